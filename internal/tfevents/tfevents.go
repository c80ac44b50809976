package tfevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/wire"
)

// A Writer is a [event.Sink] that writes the figures of a run to one file of a log folder.
type Writer struct {
	mu  sync.Mutex
	f   *os.File
	now event.Clock
	err error

	began bool // the record that says where this file begins is written
}

// fileVersion is what every file begins with; TensorBoard reads older ones by other rules.
const fileVersion = "brain.Event:2"

// Create starts a new file in a folder, which is made if it is not there. TensorBoard reads all
// files of a folder in the order of their names, so the name begins with the time.
func Create(dir string, now event.Clock) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	at := now()
	name := fmt.Sprintf("events.out.tfevents.%010d.deepwell", at.Unix())
	for n := 0; ; n++ {
		path := filepath.Join(dir, name)
		if n > 0 { // restarted within a second
			path = fmt.Sprintf("%s.%03d", path, n)
		}
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		w := &Writer{f: f, now: now}
		w.write(message(at, 0, fieldVersion, []byte(fileVersion)))
		return w, nil
	}
}

// Emit implements event.Sink: it writes what has a curve, and drops the rest.
func (w *Writer) Emit(e event.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e := e.(type) {
	case event.Step:
		values := []scalar{{"train/loss", float64(e.Loss)}, {"train/grad_norm", float64(e.GradNorm)},
			{"train/rate", e.Rate}, {"train/tokens_per_second", e.TokensPerSecond}}
		if e.MFU > 0 {
			values = append(values, scalar{"train/mfu", e.MFU})
		}
		if e.MemoryBytes > 0 {
			values = append(values, scalar{"train/memory_gib", float64(e.MemoryBytes) / (1 << 30)})
		}
		w.record(e.Step, summary(values))
	case event.Eval:
		w.record(e.Step, summary([]scalar{{"eval/loss", float64(e.Loss)}}))
	case event.Resumed:
		w.begin(e.Step + 1)
	}
}

// begin says that from a step on, what older files say was taken back. Every file says so once:
// TensorBoard's slower reader passes over the first such record that it meets.
func (w *Writer) begin(step int) {
	if !w.began {
		w.began = true
		w.write(message(w.now(), step, fieldSession, wire.Msg(nil).Int(sessionStatus, statusStart)))
	}
}

// Close closes the file and gives the first error that was met.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.err, w.f.Close())
}

func (w *Writer) record(step int, body []byte) {
	w.begin(step)
	w.write(message(w.now(), step, fieldSummary, body))
}

// write adds a record in one write. A training step must not fail for a curve, so an error is kept
// for Close.
func (w *Writer) write(body []byte) {
	if w.err == nil {
		_, w.err = w.f.Write(frame(body))
	}
}

// frame wraps a record: length, checksum of the length, body, checksum of the body.
func frame(body []byte) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(body)))
	b = binary.LittleEndian.AppendUint32(b, masked(b))
	b = append(b, body...)
	return binary.LittleEndian.AppendUint32(b, masked(body))
}

// masked is the checksum of a record: CRC-32C, rotated and shifted, since a CRC over data that
// holds CRCs is weak. The constant is the TFRecord format's.
func masked(b []byte) uint32 {
	crc := crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
	return (crc>>15 | crc<<17) + 0xa282ead8
}

// The fields of the messages Event, Summary, Summary.Value and SessionLog, from event.proto and
// summary.proto.
const (
	fieldTime    protowire.Number = 1
	fieldStep    protowire.Number = 2
	fieldVersion protowire.Number = 3
	fieldSummary protowire.Number = 5
	fieldSession protowire.Number = 7

	summaryValue protowire.Number = 1
	valueTag     protowire.Number = 1
	valueSimple  protowire.Number = 2

	sessionStatus protowire.Number = 1
)

// statusStart is SessionLog.START.
const statusStart = 1

// message builds an Event with one field beside its time and step.
func message(at time.Time, step int, field protowire.Number, body []byte) []byte {
	m := wire.Msg(nil).Double(fieldTime, float64(at.UnixNano())/1e9)
	if step != 0 {
		m = m.Int(fieldStep, int64(step))
	}
	return m.Bytes(field, body)
}

type scalar struct {
	tag   string
	value float64
}

func summary(values []scalar) (m wire.Msg) {
	for _, v := range values {
		one := wire.Msg(nil).Text(valueTag, v.tag).Float(valueSimple, float32(v.value))
		m = m.Bytes(summaryValue, one)
	}
	return m
}
