// Stores a job, works on it and acks it, with stubs generated as docs/clients.md says.
package main

import (
	"context"
	_ "embed"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"time"

	"github.com/google/uuid"
	windrowv1 "github.com/windrow-dev/windrow/gen/go/windrow/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	org      = "acme"
	queue    = "cards-go"
	triesMax = 60
	try      = 10 * time.Second
	wait     = 20 * time.Second
)

//go:embed proto/windrow/v1/service_config.json
var serviceConfig string

func connect(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time:                10 * time.Second,
			Timeout:             8 * time.Second,
			PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)),
	)
}

// Says whether it is useless to try again. If not, it is safe to try again, because of ids and lease tokens.
func final(code codes.Code) bool {
	switch code {
	case codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated, codes.PermissionDenied:
		return true
	}
	return false
}

// Repeats a call until there is an answer. Each try has a deadline of its own.
func call[Request, Response any](
	method func(context.Context, *Request, ...grpc.CallOption) (*Response, error), request *Request, deadline time.Duration,
) (*Response, error) {
	for tries, pause := 1, 50*time.Millisecond; ; tries, pause = tries+1, min(2*pause, 2*time.Second) {
		ctx, cancel := context.WithTimeout(context.Background(), deadline)
		response, err := method(ctx, request)
		cancel()
		if err == nil || final(status.Code(err)) || tries == triesMax {
			return response, err
		}
		log.Printf("another try after %s", status.Code(err))
		time.Sleep(pause/2 + rand.N(pause/2))
	}
}

func main() {
	address := os.Getenv("WINDROW_ADDRESS")
	if address == "" {
		address = "127.0.0.1:7419"
	}
	channel, err := connect(address)
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()
	client := windrowv1.NewQueueClient(channel)

	job := &windrowv1.NewJob{
		Id:       uuid.Must(uuid.NewV7()).String(),
		Template: &windrowv1.JobTemplate{Queue: queue, Kind: "card", Payload: []byte("ada")},
	}
	stored, err := call(client.Enqueue, &windrowv1.EnqueueRequest{Org: org, Jobs: []*windrowv1.NewJob{job}}, try)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("stored", stored.Results[0].Id)

	request := &windrowv1.DequeueRequest{Org: org, Queues: []string{queue}, Wait: durationpb.New(wait)}
	var leased *windrowv1.DequeueResponse
	// Repeat the call: a router that shuts down answers without jobs.
	for len(leased.GetJobs()) == 0 {
		if leased, err = call(client.Dequeue, request, wait+try); err != nil {
			log.Fatal(err)
		}
	}
	for _, job := range leased.Jobs {
		fmt.Println("a card to", string(job.Payload))
		acked, err := call(client.Ack, &windrowv1.AckRequest{Org: org, Acks: []*windrowv1.Ack{{Lease: job.Lease}}}, try)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("acked", acked.Answers[0])
	}

	bad := &windrowv1.NewJob{Template: &windrowv1.JobTemplate{Queue: "?", Kind: "card"}}
	_, err = call(client.Enqueue, &windrowv1.EnqueueRequest{Org: org, Jobs: []*windrowv1.NewJob{bad}}, try)
	for _, detail := range status.Convert(err).Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			fmt.Println("refused", bad.FieldViolations[0].Field)
		}
	}
}
