package redistest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// MasterName is how Sentinels know their master.
const MasterName = "aegis"

// Sentinel is a master with a replica, watched by three sentinels.
type Sentinel struct {
	Master, Replica *Server
	sentinels       []*Server
}

// StartSentinel runs them until the test ends. It needs redis-server on PATH.
func StartSentinel(t testing.TB) *Sentinel {
	t.Helper()
	needServer(t)
	s := &Sentinel{Master: Start(t, "--repl-diskless-sync-delay", "0")}
	host, port := s.Master.hostPort(t)
	s.Replica = Start(t, "--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0")
	await(t, "the replica to follow", s.Replica, "replication", "master_link_status:up")
	for range 3 {
		w := &Server{Addr: FreeAddr(t)}
		whost, wport := w.hostPort(t)
		dir := t.TempDir()
		file := filepath.Join(dir, "sentinel.conf")
		conf := fmt.Sprintf("bind %s\nport %s\ndir %s\nsentinel monitor %s %s %s 2\nsentinel down-after-milliseconds %s 500\nsentinel failover-timeout %s 3000\n",
			whost, wport, dir, MasterName, host, port, MasterName, MasterName)
		must(t, "sentinel.conf", os.WriteFile(file, []byte(conf), 0o600))
		w.run = func(t testing.TB) { w.startProcess(t, []string{file, "--sentinel"}) }
		w.start(t)
		s.sentinels = append(s.sentinels, w)
	}
	for _, w := range s.sentinels {
		await(t, "the sentinels to see each other and the replica", w, "sentinel", "slaves=1,sentinels=3")
	}
	return s
}

// await waits until a section of the server's INFO says what it should.
func await(t testing.TB, what string, s *Server, section, says string) {
	t.Helper()
	Await(t, what, func() error {
		info, err := s.Client.Info(context.Background(), section).Result()
		if err == nil && !strings.Contains(info, says) {
			err = fmt.Errorf("no %q in %s", says, info)
		}
		return err
	})
}

// Addrs are the sentinels' addresses.
func (s *Sentinel) Addrs() []string {
	var out []string
	for _, w := range s.sentinels {
		out = append(out, w.Addr)
	}
	return out
}

// Failover makes the replica the master, and the master its replica.
func (s *Sentinel) Failover(t testing.TB) {
	t.Helper()
	must(t, "failover", s.sentinels[0].Client.Do(t.Context(), "sentinel", "failover", MasterName).Err())
	s.Master, s.Replica = s.Replica, s.Master
	s.AwaitMaster(t)
	await(t, "the old master to follow", s.Replica, "replication", "role:slave")
}

// AwaitMaster waits until the Master is one.
func (s *Sentinel) AwaitMaster(t testing.TB) {
	t.Helper()
	await(t, "the new master", s.Master, "replication", "role:master")
}
