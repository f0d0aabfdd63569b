package controlplane

import (
	"crypto/ed25519"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// TestForgedVersionIsReplaced: a controlplane with a key signs what it appends, takes nothing that is not
// signed by it, and puts the version that was in force behind what was forged.
func TestForgedVersionIsReplaced(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server, func(c *Config) { c.ConfigKey = "secret" })
	p.post(t, `{"routes":{"fast":{"capacity":7}}}`)
	public := events.ConfigKey("secret").Public().(ed25519.PublicKey)
	good, _ := p.config(t)
	if err := good.Verify(public); err != nil {
		t.Fatal(err)
	}
	b := server.Bus(t)
	forged := good
	forged.Version, forged.Time = 3, time.Now().UTC() // its signature is that of version 2
	data, err := events.Encode(forged)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Publish(t.Context(), events.SubjectConfigUpdates, data); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "the version that was in force, again", func() bool { return p.versions.current().Version == 4 })
	last := versionsIn(t, b)[3]
	if err := last.Verify(public); err != nil || last.Via != "restore" || string(last.Document) != string(good.Document) {
		t.Errorf("%v, %+v", err, last)
	}
}
