package bus

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
)

// record is a sealed batch: neither its bytes nor its id change any more.
type record struct {
	subject, id string
	n           uint64
	items       int
	at          time.Time // when it was sealed
	data        []byte
}

func (r record) msgID() string { return fmt.Sprintf("%s-%d", r.id, r.n) }

// backlog keeps sealed batches, in order, until they are published. Safe for concurrent use.
type backlog interface {
	// push appends a batch; false: there is no room for it now.
	push(record) bool
	// room says whether a push may succeed.
	room() bool
	// head is the oldest batch; false: there is none.
	head() (record, bool)
	// pop removes it.
	pop()
	// inMemory counts the items that only memory holds. It never waits.
	inMemory() int
	stats() backlogStats
	// close lets go of what is left; nothing but stats may be called afterwards.
	close()
}

// backlogStats counts what waits, in items and bytes on disk, and the items that were lost on the way.
type backlogStats struct {
	items int
	bytes int64
	lost  uint64
}

// single is a backlog in memory, of one batch: the one in flight.
type single struct{ flight atomic.Pointer[record] }

func (s *single) push(r record) bool { return s.flight.CompareAndSwap(nil, &r) }

func (s *single) room() bool { return s.flight.Load() == nil }

func (s *single) head() (record, bool) {
	if r := s.flight.Load(); r != nil {
		return *r, true
	}
	return record{}, false
}

func (s *single) pop() { s.flight.Store(nil) }

func (s *single) inMemory() int {
	r, _ := s.head()
	return r.items
}

func (s *single) stats() backlogStats { return backlogStats{items: s.inMemory()} }

func (s *single) close() { s.pop() }

// spool is a backlog on disk. Its directory holds one journal an id, which only the process that
// locks it touches. Journals that earlier processes left behind are adopted: what is in them goes
// first, under the ids it was written under.
//
// What is in it survives the process (kill -9), not the machine's power: nothing is synced.
type spool struct {
	limit int64
	log   zerolog.Logger

	mu       sync.Mutex
	journals []*journal // in the order of their making; the last is this process's own
	failed   time.Time  // when writing failed last
	lost     uint64
	closed   bool
	nag      nag
	held     atomic.Int64 // items in memory only, for want of a disk that takes them
}

// retryWrite is how long a disk that refused a write is left alone, while there is anything else to publish.
const retryWrite = time.Second

// openSpool adopts what is in dir, and begins the journal of id.
func openSpool(dir, id, subject string, limit int64, log zerolog.Logger) (*spool, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("spool: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("spool: %w", err)
	}
	s := &spool{limit: limit, log: log}
	for _, e := range entries {
		if !e.IsDir() || e.Name() == id {
			continue
		}
		j, err := adopt(filepath.Join(dir, e.Name()), log)
		switch {
		case errors.Is(err, errLocked):
			log.Warn().Str("journal", e.Name()).Msg("another process publishes this journal of the spool; each edge needs a data directory of its own")
		case err != nil:
			log.Error().Err(err).Str("journal", e.Name()).Msg("what an earlier process left in the spool can't be read; it stays where it is")
		case j.items == 0:
			j.remove()
		default:
			log.Info().Str("journal", e.Name()).Int("items", j.items).Int64("bytes", j.bytes).Msg("publishing what an earlier process left in the spool")
			s.journals = append(s.journals, j)
		}
	}
	slices.SortFunc(s.journals, func(a, b *journal) int { return a.made.Compare(b.made) })
	own, err := begin(filepath.Join(dir, id), origin{ID: id, Subject: subject, Made: time.Now()}, log)
	if err != nil {
		for _, j := range s.journals {
			j.close()
		}
		return nil, fmt.Errorf("spool: %w", err)
	}
	s.journals = append(s.journals, own)
	return s, nil
}

func (s *spool) own() *journal { return s.journals[len(s.journals)-1] }

func (s *spool) push(r record) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.own()
	if !s.hasRoom() {
		return false
	}
	err := j.write(r)
	if err == nil {
		return true
	}
	s.failed = time.Now()
	if s.nag.due(alarmEvery) {
		s.log.Error().Err(err).Msg("events can't be spooled to disk: until NATS has them, they would be lost with this process")
	}
	if s.total().items > 0 {
		return false
	}
	s.held.Store(int64(r.items))
	j.hold(r) // on its way at once, as if there were no spool
	return true
}

func (s *spool) room() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hasRoom()
}

func (s *spool) hasRoom() bool {
	t := s.total()
	return t.items == 0 || t.bytes < s.limit && s.held.Load() == 0 && time.Since(s.failed) >= retryWrite
}

func (s *spool) head() (record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed {
		j := s.journals[0]
		r, damaged, ok := j.head()
		s.lost += uint64(damaged)
		if ok || j == s.own() {
			return r, ok
		}
		j.remove()
		s.journals = s.journals[1:]
	}
	return record{}, false
}

func (s *spool) pop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.journals[0].pop()
	s.held.Store(0)
}

func (s *spool) inMemory() int { return int(s.held.Load()) }

func (s *spool) stats() backlogStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total()
}

func (s *spool) total() backlogStats {
	t := backlogStats{lost: s.lost}
	for _, j := range s.journals {
		t.items += j.items
		t.bytes += j.bytes
	}
	return t
}

// close leaves what is on disk to the next process.
func (s *spool) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, j := range s.journals {
		if j.unwritten {
			j.pop()
		}
		if j.items == 0 {
			j.remove()
		} else {
			j.close()
		}
	}
}

// journal is the batches of one id on disk: segments of records, each removed when all of it is
// published. Only the spool calls it, one at a time.
type journal struct {
	dir  string
	log  zerolog.Logger
	lock *os.File
	origin
	made time.Time

	segments []*segment // oldest first; written is to the last
	next     int        // number of the next segment
	items    int
	bytes    int64
	// first is the head of the journal where it is in memory; unwritten, if it is nowhere else.
	first     *record
	unwritten bool
}

// origin is what a journal says of itself, in the file "origin".
type origin struct {
	ID      string    `json:"id"`
	Subject string    `json:"subject"`
	Made    time.Time `json:"made"`
}

// segment is a file of records. read is where its first record that is not published begins.
type segment struct {
	file    *os.File
	read    int64
	written int64
	items   int // between them
}

const (
	segmentBytes = 4 << 20
	segmentExt   = ".log"
	originFile   = "origin"
	lockFile     = "lock"
)

// header precedes a record's data; Sum is the CRC-32C of what follows it.
type header struct {
	Sum   uint32
	Size  uint32
	Items uint32
	N     uint64
	At    int64 // Unix microseconds
}

const headerSize = 4 + 4 + 4 + 8 + 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// begin makes a journal, and locks it.
func begin(dir string, o origin, log zerolog.Logger) (*journal, error) {
	if err := os.Mkdir(dir, 0o750); err != nil {
		return nil, err
	}
	lock, err := lockFileIn(dir)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, originFile), text, 0o600)
	}
	if err != nil {
		lock.Close()
		return nil, err
	}
	return &journal{dir: dir, log: log, lock: lock, origin: o, made: o.Made}, nil
}

// adopt opens a journal that no living process holds.
func adopt(dir string, log zerolog.Logger) (_ *journal, err error) {
	lock, err := lockFileIn(dir)
	if err != nil {
		return nil, err
	}
	j := &journal{dir: dir, log: log, lock: lock}
	defer func() {
		if err != nil {
			j.close()
		}
	}()
	names, err := filepath.Glob(filepath.Join(dir, "*"+segmentExt))
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, originFile))
	if errors.Is(err, os.ErrNotExist) && len(names) == 0 {
		return j, nil // its process died between making the directory and the file
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &j.origin); err != nil || j.ID == "" || j.Subject == "" {
		return nil, fmt.Errorf("%s does not say whose it is: %w", filepath.Join(dir, originFile), cmp.Or(err, errors.New("no id or subject")))
	}
	j.made = j.Made
	slices.Sort(names)
	for _, name := range names {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		seg := &segment{file: f}
		j.segments = append(j.segments, seg)
		if err := j.scan(seg); err != nil {
			return nil, err
		}
	}
	return j, nil
}

// scan counts a segment's records. What follows the last whole one was being written when the
// process died.
func (j *journal) scan(seg *segment) error {
	info, err := seg.file.Stat()
	if err != nil {
		return err
	}
	for seg.written < info.Size() {
		r, size, err := j.readAt(seg, seg.written)
		if err != nil {
			j.log.Warn().Err(err).Str("segment", seg.file.Name()).Int64("bytes", info.Size()-seg.written).
				Msg("the spool ends in a batch that was not written whole; it is left out")
			break
		}
		seg.written += size
		seg.items += r.items
		j.items += r.items
		j.bytes += size
	}
	return nil
}

// readAt gives the record at an offset, and its size on disk.
func (j *journal) readAt(seg *segment, offset int64) (record, int64, error) {
	head := make([]byte, headerSize)
	if _, err := seg.file.ReadAt(head, offset); err != nil {
		return record{}, 0, err
	}
	var h header
	if _, err := binary.Decode(head, binary.LittleEndian, &h); err != nil {
		return record{}, 0, err
	}
	if h.Size > segmentBytes {
		return record{}, 0, errDamaged
	}
	data := make([]byte, h.Size)
	if _, err := seg.file.ReadAt(data, offset+headerSize); err != nil {
		return record{}, 0, err
	}
	if crc32.Update(crc32.Checksum(head[4:], castagnoli), castagnoli, data) != h.Sum {
		return record{}, 0, errDamaged
	}
	return record{
		subject: j.Subject, id: j.ID, n: h.N, items: int(h.Items), at: time.UnixMicro(h.At), data: data,
	}, headerSize + int64(h.Size), nil
}

var errDamaged = errors.New("bus: a damaged record")

// write appends a record; after an error nothing of it is there.
func (j *journal) write(r record) error {
	buf := make([]byte, 4, headerSize+len(r.data))
	buf, err := binary.Append(buf[:0], binary.LittleEndian, header{
		Size: uint32(len(r.data)), Items: uint32(r.items), N: r.n, At: r.at.UnixMicro(),
	})
	if err != nil {
		return err
	}
	buf = append(buf, r.data...)
	binary.LittleEndian.PutUint32(buf, crc32.Checksum(buf[4:], castagnoli))

	if n := len(j.segments); n == 0 || j.segments[n-1].written >= segmentBytes {
		name := filepath.Join(j.dir, fmt.Sprintf("%08d%s", j.next, segmentExt))
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		j.next++
		j.segments = append(j.segments, &segment{file: f})
	}
	seg := j.segments[len(j.segments)-1]
	if _, err := seg.file.WriteAt(buf, seg.written); err != nil {
		// What was written of it is overwritten by the next one, or found damaged.
		return errors.Join(err, seg.file.Truncate(seg.written))
	}
	seg.written += int64(len(buf))
	seg.items += r.items
	j.bytes += int64(len(buf))
	j.items += r.items
	if j.items == r.items {
		j.first = &r
	}
	return nil
}

// hold takes a record into an empty journal that can't be written.
func (j *journal) hold(r record) {
	j.first, j.unwritten = &r, true
	j.items += r.items
}

// head is the oldest record, if there is one; damaged counts the items before it that can't be read any more.
func (j *journal) head() (_ record, damaged int, _ bool) {
	if j.first != nil {
		return *j.first, 0, true
	}
	for len(j.segments) > 0 {
		seg := j.segments[0]
		if seg.read == seg.written {
			if len(j.segments) == 1 {
				break
			}
			j.drop(seg)
			continue
		}
		r, _, err := j.readAt(seg, seg.read)
		if err == nil {
			j.first = &r
			return r, damaged, true
		}
		j.log.Error().Err(err).Str("segment", seg.file.Name()).Int("items", seg.items).
			Msg("the spool can't be read any more; the rest of the segment is lost")
		damaged += seg.items
		j.items -= seg.items
		j.bytes -= seg.written - seg.read
		seg.read, seg.items = seg.written, 0
	}
	return record{}, damaged, false
}

// pop forgets the head. A journal that is empty then begins its segment anew, so that a process that
// comes after this one finds only what was not published, or a segment of it at most.
func (j *journal) pop() {
	r := j.first
	if r == nil {
		return
	}
	j.first = nil
	j.items -= r.items
	if j.unwritten {
		j.unwritten = false
		return
	}
	seg, size := j.segments[0], headerSize+int64(len(r.data))
	seg.read += size
	seg.items -= r.items
	j.bytes -= size
	if seg.read == seg.written && len(j.segments) == 1 && seg.file.Truncate(0) == nil {
		seg.read, seg.written = 0, 0
	}
}

func (j *journal) drop(seg *segment) {
	j.segments = j.segments[1:]
	name := seg.file.Name()
	if err := errors.Join(seg.file.Close(), os.Remove(name)); err != nil {
		j.log.Warn().Err(err).Msg("a segment of the spool that is published can't be removed")
	}
}

func (j *journal) close() {
	for _, seg := range j.segments {
		seg.file.Close()
	}
	j.lock.Close()
}

// remove deletes a journal with nothing in it.
func (j *journal) remove() {
	err := os.RemoveAll(j.dir)
	j.close()
	if err != nil {
		j.log.Warn().Err(err).Msg("a journal of the spool that is published can't be removed")
	}
}

var errLocked = errors.New("bus: locked by another process")

// lockFileIn locks a directory until the file is closed.
func lockFileIn(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lock(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
