// River, with the settings of its own benchmark. See ../README.md.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

const (
	fetchCooldown     = 2 * time.Millisecond
	fetchPollInterval = 20 * time.Millisecond
	maxWorkers        = 2_000
	// River drops events when the channel is full.
	eventsMax = 500_000
	// The consumer's connections, in addition to those that enqueue: for fetches, completions, and LISTEN.
	workConnections = 10
	// A lock, so that two client processes do not migrate at the same time.
	migrateLock = 20
)

const countJobs = `SELECT
	count(*) FILTER (WHERE state <> 'completed'), count(*), count(*) FILTER (WHERE state = 'completed')
FROM river_job WHERE queue = $1`

type noOp struct {
	P string `json:"p"`
}

func (noOp) Kind() string { return "no_op" }

type noOpWorker struct {
	river.WorkerDefaults[noOp]
	report *report
}

func (w *noOpWorker) Work(_ context.Context, job *river.Job[noOp]) error {
	w.report.taken(job.Args.P)
	return nil
}

type riverPeer struct {
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx]
	logger *slog.Logger
	run    string
}

func (p *riverPeer) open(ctx context.Context, dsn string, connections int) error {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return err
	}
	config.MaxConns = int32(connections + workConnections)
	if p.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	p.logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	p.client, err = river.NewClient(riverpgxv5.New(p.pool), &river.Config{Logger: p.logger})
	return err
}

func (p *riverPeer) prepare(ctx context.Context, run string) error {
	p.run = run
	connection, err := p.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer connection.Release()
	if _, err := connection.Exec(ctx, "SELECT pg_advisory_lock($1)", migrateLock); err != nil {
		return err
	}
	defer func() { _, _ = connection.Exec(ctx, "SELECT pg_advisory_unlock($1)", migrateLock) }()
	migrator, err := rivermigrate.New(riverpgxv5.New(p.pool), &rivermigrate.Config{Logger: p.logger})
	if err != nil {
		return err
	}
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

func (p *riverPeer) enqueue(ctx context.Context, payloads []string) error {
	options := &river.InsertOpts{Queue: p.run}
	if len(payloads) == 1 {
		_, err := p.client.Insert(ctx, noOp{P: payloads[0]}, options)
		return err
	}
	jobs := make([]river.InsertManyParams, len(payloads))
	for i, payload := range payloads {
		jobs[i] = river.InsertManyParams{Args: noOp{P: payload}, InsertOpts: options}
	}
	stored, err := p.client.InsertManyFast(ctx, jobs)
	if err == nil && stored != len(payloads) {
		err = fmt.Errorf("%d of %d jobs were stored", stored, len(payloads))
	}
	return err
}

func (p *riverPeer) work(ctx context.Context, _, _ int, report *report) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &noOpWorker{report: report})
	client, err := river.NewClient(riverpgxv5.New(p.pool), &river.Config{
		FetchCooldown:     fetchCooldown,
		FetchPollInterval: fetchPollInterval,
		Logger:            p.logger,
		Queues:            map[string]river.QueueConfig{p.run: {MaxWorkers: maxWorkers}},
		Workers:           workers,
	})
	if err != nil {
		return err
	}
	// River sends these events after the database has recorded the completion.
	events, _ := client.SubscribeConfig(&river.SubscribeConfig{
		ChanSize: eventsMax,
		Kinds:    []river.EventKind{river.EventKindJobCompleted},
	})
	told := make(chan struct{})
	go func() {
		defer close(told)
		for range events {
			report.finished(1)
		}
	}()
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	<-ctx.Done()
	err = client.Stop(context.WithoutCancel(ctx))
	// client.Stop() closes the channel after the last event.
	<-told
	return err
}

func (p *riverPeer) counts(ctx context.Context) (left, accepted, finished int, err error) {
	err = p.pool.QueryRow(ctx, countJobs, p.run).Scan(&left, &accepted, &finished)
	return left, accepted, finished, err
}

func (p *riverPeer) close() {
	if p.pool != nil {
		p.pool.Close()
	}
}

func main() { serve(&riverPeer{}) }
