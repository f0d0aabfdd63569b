package redisstore

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/lua"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// script is a script's text and the digest under which Redis keeps it.
type script struct {
	text, sha string
}

func loadScript(name string) (script, error) {
	text, err := lua.Script(name)
	if err != nil {
		return script{}, err
	}
	return newScript(text), nil
}

func newScript(text string) script {
	sum := sha1.Sum([]byte(text))
	return script{text: text, sha: hex.EncodeToString(sum[:])}
}

// call is one run of a script.
type call struct {
	script script
	keys   []string
	args   []any

	reply []any
	err   error
}

// once is a command that no client repeats by itself, not even a cluster's.
type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }

// run runs one script and returns its answer.
func (s *Store) run(ctx context.Context, sc script, keys []string, args []any) ([]any, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", store.ErrUnavailable, ctx.Err())
	}
	c := &call{script: sc, keys: keys, args: args}
	s.send(ctx, []*call{c})
	return c.reply, c.err
}

// send runs scripts in one pipeline, by their digests, and those that Redis does not know (a new
// server, a restart, SCRIPT FLUSH) by their texts in a second: that refusal came before anything
// ran, so this repeats nothing. It sets each call's outcome.
func (s *Store) send(ctx context.Context, calls []*call) {
	unknown := s.pipeline(ctx, calls, func(c *call) once { return command(ctx, "evalsha", c.script.sha, c.keys, c.args) })
	if len(unknown) > 0 {
		s.pipeline(ctx, unknown, func(c *call) once { return command(ctx, "eval", c.script.text, c.keys, c.args) })
	}
}

// pipeline sends each call's command, sets its outcome, and returns the calls whose script is unknown.
func (s *Store) pipeline(ctx context.Context, calls []*call, command func(*call) once) (unknown []*call) {
	cmds := make([]once, len(calls))
	for i, c := range calls {
		cmds[i] = command(c)
	}
	// Errors are the commands' own.
	if len(cmds) == 1 {
		_ = s.client.Process(ctx, cmds[0])
	} else {
		p := s.client.Pipeline()
		for _, cmd := range cmds {
			_ = p.Process(ctx, cmd)
		}
		_, _ = p.Exec(ctx)
	}
	for i, c := range calls {
		c.reply, c.err = cmds[i].Slice()
		if redis.HasErrorPrefix(c.err, "NOSCRIPT") {
			unknown = append(unknown, c)
		}
		if c.err != nil {
			c.err = storeError(c.err)
		}
	}
	return unknown
}

func command(ctx context.Context, name, script string, keys []string, args []any) once {
	line := make([]any, 0, 3+len(keys)+len(args))
	line = append(line, name, script, len(keys))
	for _, k := range keys {
		line = append(line, k)
	}
	cmd := redis.NewCmd(ctx, append(line, args...)...)
	cmd.SetFirstKeyPos(3)
	return once{cmd}
}

// refusals are the replies by which a server says that it did not run the command.
var refusals = []string{
	"READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF",
	"BUSY", "NOAUTH", "WRONGPASS", "NOPERM", "MOVED", "ASK", "ERR max number of clients",
}

// storeError says by store's errors what state a failed call leaves.
func storeError(err error) error {
	var reply redis.Error
	if errors.As(err, &reply) {
		return refused(reply.Error(), err)
	}
	var op *net.OpError
	if errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) || errors.Is(err, redis.ErrClosed) ||
		errors.As(err, &op) && op.Op == "dial" {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %w", store.ErrUnknown, err)
}

// refused is storeError of what Redis or a script answered. All scripts read before they write, so a
// reply that refuses a write or a type means that nothing was changed.
func refused(text string, err error) error {
	if rest, ok := strings.CutPrefix(text, "STATE "); ok {
		index, reason, _ := strings.Cut(rest, " ")
		i, _ := strconv.Atoi(index)
		return &store.StateError{Index: i, Reason: reason}
	}
	if strings.HasPrefix(text, "OOM") {
		return fmt.Errorf("%w: %w", store.ErrFull, err)
	}
	if strings.HasPrefix(text, "TRYAGAIN") {
		return fmt.Errorf("%w: %w", store.ErrMoving, err)
	}
	for _, prefix := range refusals {
		if strings.HasPrefix(text, prefix) {
			return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
		}
	}
	if strings.HasPrefix(text, "WRONGTYPE") || strings.HasPrefix(text, "FORMAT") {
		return fmt.Errorf("%w: %w", store.ErrState, err)
	}
	return fmt.Errorf("%w: %w", store.ErrUnknown, err)
}
