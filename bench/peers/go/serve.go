package main

// The loop of a peer written in Go. It reads and writes frames until standard input ends. ../wire.py describes the
// frames, and ../python/serve.py says what a peer must do.

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const (
	frameCall     = 1
	frameEnqueue  = 2
	frameAnswer   = 3
	frameTaken    = 4
	frameFinished = 5
	headBytes     = 5
	// One frame reports many jobs. A job is reported at most this long after it was taken.
	tellEvery = 2 * time.Millisecond
	endMax    = 5 * time.Second
)

// A peer has the operations of one queue system, implemented with its own library.
type peer interface {
	// Connects, and makes the schema if it is missing. At most `connections` calls of enqueue run at the same time.
	open(ctx context.Context, dsn string, connections int) error
	// Makes an empty queue. Another process may have made it already.
	prepare(ctx context.Context, run string) error
	// Stores jobs by one call of the system. Returns after their transaction has committed.
	enqueue(ctx context.Context, payloads []string) error
	// Runs the system's own consumer until ctx ends. Then the consumer finishes the jobs that it has begun.
	work(ctx context.Context, batch, concurrency int, report *report) error
	// Returns the jobs of the last prepared run that are left, accepted and finished.
	counts(ctx context.Context) (left, accepted, finished int, err error)
	close()
}

// A report collects what a consumer has done, and reports it in batches.
type report struct {
	out      *output
	mutex    sync.Mutex
	payloads []string
	timesNS  []int64
	done     uint32
	planned  bool
}

// taken is called when a handler has a job.
func (r *report) taken(payload string) {
	now := monotonicNS()
	r.mutex.Lock()
	r.payloads = append(r.payloads, payload)
	r.timesNS = append(r.timesNS, now)
	r.plan()
	r.mutex.Unlock()
}

// finished is called when this number of further jobs has finished in the database.
func (r *report) finished(jobs int) {
	r.mutex.Lock()
	r.done += uint32(jobs)
	r.plan()
	r.mutex.Unlock()
}

func (r *report) plan() {
	if !r.planned {
		r.planned = true
		time.AfterFunc(tellEvery, r.tell)
	}
}

func (r *report) tell() {
	r.mutex.Lock()
	payloads, times, done := r.payloads, r.timesNS, r.done
	r.payloads, r.timesNS, r.done, r.planned = nil, nil, 0, false
	r.mutex.Unlock()
	if len(payloads) > 0 {
		body := binary.LittleEndian.AppendUint32(nil, uint32(len(payloads)))
		for _, payload := range payloads {
			body = binary.LittleEndian.AppendUint32(body, uint32(len(payload)))
		}
		for _, payload := range payloads {
			body = append(body, payload...)
		}
		for _, at := range times {
			body = binary.LittleEndian.AppendUint64(body, uint64(at))
		}
		r.out.send(frameTaken, body)
	}
	if done > 0 {
		r.out.send(frameFinished, binary.LittleEndian.AppendUint32(nil, done))
	}
}

type output struct {
	mutex sync.Mutex
	file  io.Writer
}

func (o *output) send(kind byte, body []byte) {
	frame := make([]byte, 0, headBytes+len(body))
	frame = binary.LittleEndian.AppendUint32(frame, uint32(len(body)))
	frame = append(append(frame, kind), body...)
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if _, err := o.file.Write(frame); err != nil {
		// The client has ended.
		os.Exit(1)
	}
}

func (o *output) answer(id uint32, value any, err error) {
	told := map[string]any{"id": id, "value": value}
	if err != nil {
		told = map[string]any{"id": id, "error": err.Error()}
	}
	body, _ := json.Marshal(told)
	o.send(frameAnswer, body)
}

type call struct {
	ID          uint32 `json:"id"`
	Verb        string `json:"verb"`
	DSN         string `json:"dsn"`
	Connections int    `json:"connections"`
	Run         string `json:"run"`
	Batch       int    `json:"batch"`
	Concurrency int    `json:"concurrency"`
}

// A server executes the commands of one client.
type server struct {
	peer    peer
	out     *output
	report  *report
	endWork context.CancelFunc
	working chan struct{}
}

func serve(p peer) {
	// Ctrl-C reaches every process of the terminal. Ignore it: the client gets it too, and ends this process in order.
	signal.Ignore(syscall.SIGINT)
	out := &output{file: os.Stdout}
	s := &server{peer: p, out: out, report: &report{out: out}, endWork: func() {}, working: make(chan struct{})}
	close(s.working)
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		var head [headBytes]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			break
		}
		body := make([]byte, binary.LittleEndian.Uint32(head[:]))
		if _, err := io.ReadFull(in, body); err != nil {
			break
		}
		s.receive(head[4], body)
	}
	time.AfterFunc(endMax, func() { os.Exit(0) })
	s.rest()
	p.close()
}

func (s *server) receive(kind byte, body []byte) {
	ctx := context.Background()
	if kind == frameEnqueue {
		go func() {
			s.out.answer(binary.LittleEndian.Uint32(body), nil, s.peer.enqueue(ctx, unpack(body[4:])))
		}()
		return
	}
	var told call
	if err := json.Unmarshal(body, &told); err != nil {
		panic(err)
	}
	switch told.Verb {
	case "work":
		working := make(chan struct{})
		workContext, endWork := context.WithCancel(ctx)
		s.working, s.endWork = working, endWork
		go func() {
			defer close(working)
			s.out.answer(told.ID, nil, s.peer.work(workContext, told.Batch, told.Concurrency, s.report))
		}()
	case "rest":
		go func() {
			s.rest()
			s.out.answer(told.ID, nil, nil)
		}()
	default:
		go func() {
			value, err := s.obey(ctx, told)
			s.out.answer(told.ID, value, err)
		}()
	}
}

func (s *server) obey(ctx context.Context, told call) (any, error) {
	switch told.Verb {
	case "open":
		return nil, s.peer.open(ctx, told.DSN, told.Connections)
	case "prepare":
		return nil, s.peer.prepare(ctx, told.Run)
	case "counts":
		left, accepted, finished, err := s.peer.counts(ctx)
		return map[string]int{"left": left, "accepted": accepted, "finished": finished}, err
	}
	return nil, fmt.Errorf("there is no verb %q", told.Verb)
}

func (s *server) rest() {
	s.endWork()
	<-s.working
	s.report.tell()
}

func unpack(body []byte) []string {
	count := int(binary.LittleEndian.Uint32(body))
	payloads := make([]string, count)
	at := 4 + 4*count
	for i := range payloads {
		size := int(binary.LittleEndian.Uint32(body[4+4*i:]))
		payloads[i] = string(body[at : at+size])
		at += size
	}
	return payloads
}

// The clock that the client's time.monotonic_ns() reads. Go offers its monotonic clock only as differences.
var (
	goStart    = time.Now()
	clockStart = clockMonotonicNS()
)

func monotonicNS() int64 { return clockStart + int64(time.Since(goStart)) }

func clockMonotonicNS() int64 {
	const clockMonotonic = 1
	var now syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&now)), 0); errno != 0 {
		panic(errno)
	}
	return now.Nano()
}
