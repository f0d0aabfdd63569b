package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

type deadLetterCommands struct {
	List  deadLetterList  `cmd:"" help:"List the dead letters."`
	Show  deadLetterShow  `cmd:"" help:"Print one, with the message that it is about."`
	Retry deadLetterRetry `cmd:"" help:"Settle what the letters left out, once its reason is gone; one that is retried twice is settled once."`
}

type deadLetterList struct {
	natsURL
}

func (c deadLetterList) Run(ctx context.Context, r *remote) error {
	return c.withBus(ctx, r, func(b *bus.Bus) error { return listDeadLetters(ctx, b, r.out) })
}

type deadLetterShow struct {
	natsURL
	Letter uint64 `arg:"" help:"The letter's number in the list."`
}

func (c deadLetterShow) Run(ctx context.Context, r *remote) error {
	return c.withBus(ctx, r, func(b *bus.Bus) error { return showDeadLetter(ctx, b, r.out, c.Letter) })
}

type deadLetterRetry struct {
	natsURL
	Letters []uint64 `arg:"" help:"Their numbers in the list."`
}

func (c deadLetterRetry) Run(ctx context.Context, r *remote) error {
	return c.withBus(ctx, r, func(b *bus.Bus) error { return retryDeadLetters(ctx, b, r.out, c.Letters) })
}

// natsURL is the NATS of commands that read streams; --nats-user and its password are common to all.
type natsURL struct {
	NATSURL string `name:"nats-url" env:"AEGIS_NATS_URL" default:"nats://127.0.0.1:4222" help:"NATS servers, comma separated."`
}

// withBus runs a command that talks to NATS as the user "operator" may.
func (n natsURL) withBus(ctx context.Context, r *remote, run func(*bus.Bus) error) error {
	b, err := r.connect(ctx, n.NATSURL)
	if err != nil {
		return err
	}
	defer b.Close()
	return run(b)
}

// listDeadLetters writes a line a letter.
func listDeadLetters(ctx context.Context, b *bus.Bus, w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "LETTER\tTIME\tSERVICE\tSTREAM\tSEQ\tREASON")
	state, err := b.Stream(ctx, events.StreamDeadLetter)
	if err != nil {
		return err
	}
	for seq := max(state.First, 1); seq <= state.Last; seq++ {
		m, err := b.At(ctx, events.StreamDeadLetter, seq)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		_, service, _ := strings.Cut(strings.TrimPrefix(m.Subject, "aegis."), ".")
		d, err := events.Decode[events.DeadLetter](m.Data)
		if err != nil {
			d.Reason = err.Error()
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%d\t%s\n", m.Seq, m.Time.UTC().Format(time.DateTime), service, d.Stream, d.Seq, oneLine(d.Reason))
	}
	return table.Flush()
}

// oneLine cuts a reason to what fits a line.
func oneLine(s string) string {
	const most = 160
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// deadLetter reads the letter of that sequence.
func deadLetter(ctx context.Context, b *bus.Bus, seq uint64) (bus.Message, events.DeadLetter, error) {
	m, err := b.At(ctx, events.StreamDeadLetter, seq)
	if errors.Is(err, bus.ErrNotFound) {
		return m, events.DeadLetter{}, fmt.Errorf("there is no dead letter %d", seq)
	}
	if err != nil {
		return m, events.DeadLetter{}, err
	}
	d, err := events.Decode[events.DeadLetter](m.Data)
	return m, d, err
}

// showDeadLetter writes a letter as JSON, and its message too where that is JSON.
func showDeadLetter(ctx context.Context, b *bus.Bus, w io.Writer, seq uint64) error {
	m, d, err := deadLetter(ctx, b, seq)
	if err != nil {
		return err
	}
	shown := struct {
		Letter  uint64          `json:"letter"`
		Time    time.Time       `json:"time"`
		Message json.RawMessage `json:"message,omitempty"`
		events.DeadLetter
	}{Letter: m.Seq, Time: m.Time, DeadLetter: d}
	if json.Valid(d.Data) {
		shown.Message, shown.Data = d.Data, nil
	}
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	return out.Encode(shown)
}

// retryDeadLetters publishes the letters' settlements again. A letter that is retried twice is settled once.
func retryDeadLetters(ctx context.Context, b *bus.Bus, w io.Writer, seqs []uint64) error {
	var failed []error
	for _, seq := range seqs {
		stored, err := retryDeadLetter(ctx, b, seq)
		if err != nil {
			failed = append(failed, fmt.Errorf("dead letter %d: %w", seq, err))
			continue
		}
		fmt.Fprintf(w, "dead letter %d: published as message %d of %s\n", seq, stored, events.StreamResponses)
	}
	return errors.Join(failed...)
}

func retryDeadLetter(ctx context.Context, b *bus.Bus, seq uint64) (stored uint64, err error) {
	_, d, err := deadLetter(ctx, b, seq)
	if err != nil {
		return 0, err
	}
	batch, err := d.Retry()
	if err != nil {
		return 0, fmt.Errorf("it can't be settled yet: %w", err)
	}
	data, err := events.Encode(batch)
	if err != nil {
		return 0, err
	}
	return b.Publish(ctx, events.SubjectRetry, data, bus.WithMsgID(batch.Boot))
}
