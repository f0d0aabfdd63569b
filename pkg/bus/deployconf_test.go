package bus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// The users of deploy/nats.conf.
var deployUsers = []string{"edge", "settler", "healthwatch", "controlplane", "operator"}

// deployEnv sets the passwords that deploy/nats.conf takes from its environment.
var deployEnv = sync.OnceValue(func() error {
	var errs []error
	for _, user := range deployUsers {
		errs = append(errs, os.Setenv("AEGIS_NATS_"+strings.ToUpper(user)+"_PASSWORD", deployPassword(user)))
	}
	return errors.Join(errs...)
})

func deployPassword(user string) string { return "test-" + user }

// deployServer is a server with the configuration of the compose stack.
func deployServer(t *testing.T, opts ...bustest.Option) *bustest.Server {
	t.Helper()
	if err := deployEnv(); err != nil {
		t.Fatal(err)
	}
	return bustest.Start(t, append(opts, bustest.ConfigFile("../../deploy/nats.conf"))...)
}

// as connects the way the service of that name does.
func as(t *testing.T, s *bustest.Server, user string) *bus.Bus {
	t.Helper()
	b := s.Bus(t, func(c *bus.Config) { c.Name, c.User, c.Password = user, user, deployPassword(user) })
	bustest.Await(t, user+" connects", b.Connected)
	return b
}

// rawConn connects with nats.go alone, as an intruder who has a service's password would.
func rawConn(t *testing.T, s *bustest.Server, user string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.UserInfo(user, deployPassword(user)),
		nats.CustomInboxPrefix("_INBOX_"+user), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// denied reports whether the server refused what the connection just did. The server
// sends its refusal before the answer to the flush, so nothing is left to wait for.
func denied(t *testing.T, nc *nats.Conn, verb, subject string) bool {
	t.Helper()
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	err := nc.LastError()
	return err != nil && strings.Contains(err.Error(), fmt.Sprintf("%s to %q", verb, subject))
}

func streamNames() []string {
	var names []string
	for _, s := range events.Streams() {
		names = append(names, s.Name)
	}
	return names
}

// TestDeployPublish goes through every subject and every user: what the table does not
// allow must be refused. Patterns are those of path.Match, where * stays within a token here.
func TestDeployPublish(t *testing.T) {
	t.Parallel()
	allowed := map[string][]string{
		"edge": {
			"aegis.response.b1", events.SubjectRetry, "aegis.edge.heartbeat.e1", "aegis.bucket.changed.7", "aegis.deadletter.edge",
			"read AEGIS_CONFIG", "last AEGIS_CONFIG", "read AEGIS_HEALTH", "last AEGIS_HEALTH",
			"read KV_AEGIS_RULES", "get KV_AEGIS_RULES",
			"aegis.deferred.c", "aegis.deferral.i", "work AEGIS_DEFERRED", "info AEGIS_DEFERRALS", "last AEGIS_DEFERRALS",
		},
		"settler": {
			"aegis.deadletter.settler", "aegis.bucket.changed.7",
			"read AEGIS_RESPONSES", "purge AEGIS_RESPONSES",
		},
		"healthwatch": {
			"aegis.health.u1", "aegis.deadletter.healthwatch",
			"read AEGIS_RESPONSES", "read AEGIS_CONFIG", "last AEGIS_CONFIG", "read AEGIS_HEALTH", "last AEGIS_HEALTH",
		},
		"controlplane": {
			"aegis.config.updates", "aegis.audit", "aegis.deadletter.controlplane",
			"aegis.bucket.changed.7", events.SubjectRules("user.ann"), "read KV_AEGIS_RULES", "get KV_AEGIS_RULES",
			"info *", "create *", "update *",
			"read AEGIS_CONFIG", "last AEGIS_CONFIG", "read AEGIS_HEALTH", "last AEGIS_HEALTH",
		},
		"operator": {
			"aegis.config.command", "aegis.control", events.SubjectRetry, "$SRV.PING", "$SRV.INFO", "$SRV.STATS",
			"info *", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST",
		},
	}

	// What clients deferred is for edges only: it holds their credentials.
	for _, s := range append(streamNames(), "FOREIGN") {
		if s != events.StreamDeferred && s != events.StreamDeferrals {
			allowed["operator"] = append(allowed["operator"], "last "+s)
		}
	}

	// action -> the subjects it publishes to.
	actions := map[string][]string{}
	for _, subject := range []string{
		events.SubjectConfigCommand, events.SubjectControl, events.SubjectConfigUpdates, events.SubjectAudit,
		events.SubjectRules("user.ann"), events.SubjectChanged(7),
		"aegis.deferred.c", "aegis.deferral.i",
		events.SubjectResponse("b1"), events.SubjectRetry, events.SubjectHealth("u1"), events.SubjectHeartbeat("e1"),
		"$SRV.PING", "$SRV.INFO", "$SRV.STATS",
		"$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$SYS.REQ.SERVER.PING",
		"$KV.any.key", "unrelated",
	} {
		actions[subject] = []string{subject}
	}
	for _, user := range deployUsers {
		actions[events.SubjectDeadLetter(user)] = []string{events.SubjectDeadLetter(user)}
		actions["inbox of "+user] = []string{"_INBOX_" + user + ".x"}
	}
	for _, s := range events.Streams() {
		if s.WorkQueue { // the others are read without acknowledgements
			actions["work "+s.Name] = []string{
				"$JS.API.CONSUMER.CREATE." + s.Name + ".edge", "$JS.API.CONSUMER.MSG.NEXT." + s.Name + ".edge",
				"$JS.ACK." + s.Name + ".edge.1.1.1.1.0",
			}
		}
	}
	for _, s := range append(streamNames(), "FOREIGN") {
		actions["info "+s] = []string{"$JS.API.STREAM.INFO." + s}
		actions["create "+s] = []string{"$JS.API.STREAM.CREATE." + s}
		actions["update "+s] = []string{"$JS.API.STREAM.UPDATE." + s}
		actions["purge "+s] = []string{"$JS.API.STREAM.PURGE." + s}
		actions["get "+s] = []string{"$JS.API.DIRECT.GET." + s + ".x", "$JS.API.DIRECT.GET." + s + ".x.y"}
		actions["last "+s] = []string{"$JS.API.STREAM.MSG.GET." + s}
		actions["read "+s] = []string{
			"$JS.API.CONSUMER.CREATE." + s + ".c", "$JS.API.CONSUMER.CREATE." + s + ".c.aegis.x",
			"$JS.API.CONSUMER.MSG.NEXT." + s + ".c", "$JS.API.CONSUMER.DELETE." + s + ".c",
		}
		actions["destroy "+s] = []string{
			"$JS.API.STREAM.DELETE." + s, "$JS.API.STREAM.MSG.DELETE." + s, "$JS.API.STREAM.RESTORE." + s,
			"$JS.API.STREAM.SNAPSHOT." + s, "$JS.API.CONSUMER.DURABLE.CREATE." + s + ".c", "$JS.API.CONSUMER.CREATE." + s,
		}
	}
	// Whoever reads a stream asks for its state too.
	for user, list := range allowed {
		for _, a := range list {
			if s, ok := strings.CutPrefix(a, "read "); ok {
				allowed[user] = append(allowed[user], "info "+s)
			}
		}
	}

	s := deployServer(t)
	for _, user := range deployUsers {
		nc := rawConn(t, s, user)
		granted := 0
		for action, subjects := range actions {
			want := false
			for _, pattern := range allowed[user] {
				ok, err := path.Match(pattern, action)
				if err != nil {
					t.Fatal(err)
				}
				want = want || ok
			}
			for _, subject := range subjects {
				if err := nc.Publish(subject, nil); err != nil {
					t.Fatal(err)
				}
				if got := !denied(t, nc, "Publish", subject); got != want {
					t.Errorf("%s, publish to %s (%s): allowed %v, want %v", user, subject, action, got, want)
				} else if got {
					granted++
				}
			}
		}
		if granted == 0 {
			t.Errorf("%s was granted nothing: the test did not reach the server's permissions", user)
		}
	}
}

// TestDeploySubscribe: nobody reads the answers to others, and only the controlplane is the config service.
func TestDeploySubscribe(t *testing.T) {
	t.Parallel()
	allowed := map[string][]string{
		"edge":         {"_INBOX_edge.x", "aegis.edge.heartbeat.*"},
		"settler":      {"_INBOX_settler.x"},
		"healthwatch":  {"_INBOX_healthwatch.x"},
		"controlplane": {"_INBOX_controlplane.x", "aegis.config.command", "aegis.control", "aegis.edge.heartbeat.*", "$SRV.PING"},
		"operator":     {"_INBOX.x", "aegis.config.updates", "aegis.response.*", "aegis.health.*", "aegis.edge.heartbeat.*", "aegis.audit", "aegis.>"},
	}
	subjects := []string{
		"_INBOX.x", "aegis.config.command", "aegis.control", "aegis.config.updates", "aegis.response.*", "aegis.health.*",
		"aegis.edge.heartbeat.*", "aegis.audit", "aegis.deferred.*", "aegis.deferral.*", "aegis.>", ">", "$JS.API.>", "$SRV.PING", "$SRV.PING.other",
	}
	for _, user := range deployUsers {
		subjects = append(subjects, "_INBOX_"+user+".x")
	}
	s := deployServer(t)
	for _, user := range deployUsers {
		nc := rawConn(t, s, user)
		may := map[string]bool{}
		for _, subject := range allowed[user] {
			may[subject] = true
		}
		for _, subject := range subjects {
			sub, err := nc.SubscribeSync(subject)
			if err != nil {
				t.Fatal(err)
			}
			if got := !denied(t, nc, "Subscription", subject); got != may[subject] {
				t.Errorf("%s, subscribe to %s: allowed %v, want %v", user, subject, got, may[subject])
			}
			_ = sub.Unsubscribe() // refused ones are gone already
		}
	}
}

// TestDeployAdminToken: who watches everything does not see the token of who commands.
func TestDeployAdminToken(t *testing.T) {
	t.Parallel()
	s := deployServer(t)
	watcher, commander := operatorConn(t, s), operatorConn(t, s)
	sub, err := watcher.SubscribeSync("aegis.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	command := nats.NewMsg(events.SubjectConfigCommand)
	command.Header.Set("X-Admin-Token", "secret")
	if err := commander.PublishMsg(command); err != nil {
		t.Fatal(err)
	}
	edge := as(t, s, "edge")
	if err := edge.Send(events.SubjectHeartbeat("e1"), []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if err := commander.Flush(); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := sub.NextMsg(10 * time.Second)
		if err != nil {
			t.Fatalf("the heartbeat after the command did not come: %v", err)
		}
		switch m.Subject {
		case events.SubjectConfigCommand:
			t.Fatalf("the operator sees commands of others: %v", m.Header)
		case events.SubjectHeartbeat("e1"):
			return
		}
	}
}

// TestDeployUsers: nobody comes in without a password, or with another's.
func TestDeployUsers(t *testing.T) {
	t.Parallel()
	s := deployServer(t, bustest.Listen())
	for _, opts := range [][]nats.Option{
		nil,
		{nats.UserInfo("edge", "")},
		{nats.UserInfo("edge", deployPassword("settler"))},
		{nats.UserInfo("nobody", deployPassword("edge"))},
	} {
		nc, err := nats.Connect(s.URL(), opts...)
		if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("got %v, want an authorization error", err)
		}
		if err == nil {
			nc.Close()
		}
	}
}

// TestDeployJobs runs what each service does on the bus, all at once, with its own user.
func TestDeployJobs(t *testing.T) {
	t.Parallel()
	s := deployServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()

	control := as(t, s, "controlplane")
	for range 2 { // again, as every controlplane does that starts later
		if err := control.Provision(ctx, events.Streams()); err != nil {
			t.Fatalf("controlplane provisions: %v", err)
		}
	}
	edge, settler, health, operator := as(t, s, "edge"), as(t, s, "settler"), as(t, s, "healthwatch"), operatorConn(t, s)

	beats := make(chan bus.Message, 8)
	for _, b := range []*bus.Bus{edge, control} {
		if _, err := b.Subscribe(events.AllHeartbeats, func(m bus.Message) { beats <- m }); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := control.Serve(bus.ServiceInfo{
		Name: "aegis-config", Version: "1.0.0", Description: "test", Endpoint: "command", Subject: events.SubjectConfigCommand,
	}, func(r bus.Request) ([]byte, *bus.ServiceError) { return r.Data, nil }); err != nil {
		t.Fatal(err)
	}

	publish := func(who string, b *bus.Bus, subject string) {
		t.Helper()
		if _, err := b.Publish(ctx, subject, []byte("{}"), bus.WithMsgID(who+subject)); err != nil {
			t.Errorf("%s publishes to %s: %v", who, subject, err)
		}
	}
	publish("controlplane", control, events.SubjectConfigUpdates)
	publish("controlplane", control, events.SubjectAudit)
	publish("edge", edge, events.SubjectResponse("b1"))
	publish("edge", edge, events.SubjectDeadLetter("edge"))
	publish("settler", settler, events.SubjectDeadLetter("settler"))
	publish("healthwatch", health, events.SubjectHealth("u1"))
	publish("healthwatch", health, events.SubjectDeadLetter("healthwatch"))

	follow := func(who string, b *bus.Bus, stream string) {
		t.Helper()
		seen := errors.New("seen")
		if err := b.Follow(ctx, stream, bus.All(), func(bus.Message) error { return seen }); !errors.Is(err, seen) {
			t.Errorf("%s follows %s: %v", who, stream, err)
		}
		if st, err := b.Stream(ctx, stream); err != nil || st.Msgs != 1 {
			t.Errorf("%s asks for %s: %+v, %v", who, stream, st, err)
		}
	}
	follow("edge", edge, events.StreamConfig)
	follow("edge", edge, events.StreamHealth)
	follow("settler", settler, events.StreamResponses)
	follow("healthwatch", health, events.StreamResponses)
	follow("healthwatch", health, events.StreamConfig)
	follow("healthwatch", health, events.StreamHealth)
	follow("controlplane", control, events.StreamConfig)
	follow("controlplane", control, events.StreamHealth)

	for who, b := range map[string]*bus.Bus{"edge": edge, "healthwatch": health, "controlplane": control} {
		if _, err := b.Last(ctx, events.StreamConfig, events.SubjectConfigUpdates); err != nil {
			t.Errorf("%s reads the last config: %v", who, err)
		}
	}
	if err := settler.Purge(ctx, events.StreamResponses, 2); err != nil {
		t.Errorf("settler purges: %v", err)
	}

	if err := edge.Send(events.SubjectHeartbeat("e1"), []byte("{}")); err != nil {
		t.Error(err)
	}
	for range 2 {
		select {
		case <-beats:
		case <-ctx.Done():
			t.Fatal("the edge's heartbeat did not reach edge and controlplane")
		}
	}

	// The operator, with the inbox of the stock CLI.
	reply, err := operator.RequestWithContext(ctx, events.SubjectConfigCommand, []byte("change"))
	if err != nil || string(reply.Data) != "change" {
		t.Fatalf("operator's command: %v, %v", reply, err)
	}
	pong, err := operator.RequestWithContext(ctx, "$SRV.PING", nil)
	if err != nil || !strings.Contains(string(pong.Data), "aegis-config") {
		t.Fatalf("operator pings services: %v, %v", pong, err)
	}
}

// operatorConn connects as the stock nats CLI does.
func operatorConn(t *testing.T, s *bustest.Server) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.UserInfo("operator", deployPassword("operator")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// TestDeployDeferred: edges store, take and finish what was deferred, and who watches everything sees nothing of it.
func TestDeployDeferred(t *testing.T) {
	t.Parallel()
	s := deployServer(t)
	control := as(t, s, "controlplane")
	if err := control.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	watcher := operatorConn(t, s)
	seen, err := watcher.SubscribeSync("aegis.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	edge := as(t, s, "edge")
	for _, subject := range []string{events.SubjectDeferred("c"), events.SubjectDeferral("i")} {
		if _, err := edge.Publish(t.Context(), subject, []byte("secret")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := edge.Last(t.Context(), events.StreamDeferrals, events.SubjectDeferral("i")); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go edge.Work(ctx, bus.WorkConfig{Stream: events.StreamDeferred, Consumer: "edge", AtOnce: 1, Life: time.Minute}, func(j bus.Job) func() {
		return func() {
			if err := j.Done(); err != nil {
				t.Error(err)
			}
		}
	})
	bustest.Await(t, "the job", func() bool {
		state, err := control.Stream(t.Context(), events.StreamDeferred)
		return err == nil && state.Last == 1 && state.Msgs == 0
	})
	if err := edge.Send(events.SubjectHeartbeat("e1"), []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if m, err := seen.NextMsg(10 * time.Second); err != nil || m.Subject != events.SubjectHeartbeat("e1") {
		t.Errorf("the operator sees %v, %v", m, err)
	}
}
