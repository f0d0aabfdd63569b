package edge

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/aegisrate/aegisrate/pkg/events"
)

// snapshot is the last good policy on disk, for a start without NATS.
type snapshot struct {
	// Stream is the incarnation of AEGIS_CONFIG that Config came from.
	Stream string `json:"stream"`
	// Config is an events.ConfigVersion in its wire form.
	Config json.RawMessage `json:"config"`
}

func snapshotFile(dir string) string { return filepath.Join(dir, "policy.snapshot.json") }

// readSnapshot gives os.ErrNotExist where there is none.
func readSnapshot(dir string) (stream string, _ events.ConfigVersion, _ error) {
	var v events.ConfigVersion
	data, err := os.ReadFile(snapshotFile(dir))
	if err != nil {
		return "", v, err
	}
	var s snapshot
	if err := json.Unmarshal(data, &s); err != nil {
		return "", v, fmt.Errorf("%s: %w", snapshotFile(dir), err)
	}
	if v, err = events.Decode[events.ConfigVersion](s.Config); err != nil {
		return "", v, fmt.Errorf("%s: %w", snapshotFile(dir), err)
	}
	return s.Stream, v, nil
}

// writeSnapshot replaces the file in one step: after a crash there is the old one or the new.
func writeSnapshot(dir, stream string, wire []byte) error {
	data, err := json.Marshal(snapshot{Stream: stream, Config: wire})
	if err != nil {
		return err
	}
	return replaceFile(snapshotFile(dir), data)
}

// replaceFile writes a file in one step.
func replaceFile(name string, data []byte) error {
	dir := filepath.Dir(name)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, filepath.Base(name)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already where all went well
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync() // the rename itself
}
