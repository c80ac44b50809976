package data

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
)

// A Stream gives the batches that another program writes, such as Python into standard input. All
// numbers are little-endian, of 32 bits:
//
//	header: "deepwell", version 1, sequences, seq, documents, shifts
//	record: kind, bytes of what follows, and that
//
// Kind 1 is a batch: a bit for each array that it has (1 ids, 2 labels, 4 positions, 8 segments, 16
// mask), then the arrays [sequences, seq], in that order. Ids are required. A label is the token to
// learn, or negative. If shifts is 1, as in transformers, labels stand at their own token, and move
// to the one before. Without labels each is the next token of its document. Without segments a new
// document begins where positions begin at 0 again; without positions they count from the beginning
// of each document. The mask is 0 behind the end of a sequence, where nothing is learned, and 1
// elsewhere. Kind 2, without bytes, is the end of the data, and kind 3 an error of the other
// program: its text. A stream without either is truncated.
//
// documents is how many a sequence has at most; with 1 no batch has segments, and positions count
// from 0.
//
// A Stream cannot go back. It begins with the first batch also for a run that resumes: what the run
// has had is read and dropped.
type Stream struct {
	sequences, seq int
	documents      int64
	shifts         bool // labels stand at their own token
	close          context.CancelCauseFunc
	// batches has what was read ahead. When it is closed, end says why there are no more.
	batches chan *Batch
	end     error

	mu    sync.Mutex // of the fields below
	taken int64      // sequences that came out of batches
	last  *Batch     // the last of them: a step that failed may take it again
}

// streamed is the name of the only source in positions of a Stream.
const streamed = "stream"

// ahead is how many batches are read before they are wanted.
const ahead = 4

// Kinds of records, and what a record has at most that is not a batch.
const (
	recordBatch = 1
	recordEnd   = 2
	recordError = 3

	streamVersion = 1
	maxErrorText  = 16 << 10
)

// streamMagic is how a stream begins.
const streamMagic = "deepwell"

// NewStream reads the header of a stream of batches of the given size, and begins to read ahead. If
// r is an [io.Closer], Close closes it; else a read that is on its way outlives the Stream.
func NewStream(ctx context.Context, r io.Reader, sequences, seq int) (*Stream, error) {
	s := &Stream{sequences: sequences, seq: seq, batches: make(chan *Batch, ahead)}
	reading, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	s.close = func(err error) {
		cancel(err)
		if c, ok := r.(io.Closer); ok {
			_ = c.Close() // there is nothing to lose
		}
	}
	begun := make(chan error, 1)
	go func() {
		defer close(s.batches)
		if s.end = s.header(r); s.end != nil {
			begun <- s.end
			return
		}
		begun <- nil
		for s.end == nil {
			var b *Batch
			if b, s.end = s.record(r); b == nil {
				continue
			}
			select {
			case s.batches <- b:
			case <-reading.Done():
				s.end = context.Cause(reading)
			}
		}
	}()
	select {
	case err := <-begun:
		return s, err
	case <-ctx.Done():
		s.close(context.Cause(ctx))
		return nil, wanted(ctx)
	}
}

// header reads the beginning of a stream.
func (s *Stream) header(r io.Reader) error {
	var head [len(streamMagic) + 20]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return truncated(err, "before its header")
	}
	n := numbers32(head[len(streamMagic):])
	switch {
	case string(head[:len(streamMagic)]) != streamMagic:
		return malformed("it does not begin with %q", streamMagic).
			Try("write it with the Python package, or as package data documents it")
	case n[0] != streamVersion:
		return malformed("it is of version %d, and this program reads %d", n[0], streamVersion).
			Try("install the Python package and the program from one wheel")
	case int(n[1]) != s.sequences || int(n[2]) != s.seq:
		return malformed("its batches have %d sequences of %d tokens, and the recipe says %d of %d",
			n[1], n[2], s.sequences, s.seq).Try("set batch to %d and seq to %d", n[1], n[2])
	case n[3] < 1 || int(n[3]) > s.seq:
		return malformed("%d documents cannot be in a sequence of %d tokens", n[3], s.seq)
	case n[4] > 1:
		return malformed("labels shift by %d", n[4])
	}
	s.documents, s.shifts = int64(n[3]), n[4] == 1
	return nil
}

// record reads the next batch, or why there are no more.
func (s *Stream) record(r io.Reader) (*Batch, error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, truncated(err, "without a record of its end")
	}
	kind, size := numbers32(head[:])[0], numbers32(head[:])[1]
	switch kind {
	case recordBatch:
		return s.batch(r, size)
	case recordEnd:
		if size != 0 {
			return nil, malformed("its end has %d bytes", size)
		}
		return nil, diag.New(diag.DataEnd, "the data has ended")
	case recordError:
		if size > maxErrorText {
			return nil, malformed("an error has %d bytes of text", size)
		}
		text := make([]byte, size)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, truncated(err, "in an error")
		}
		if !utf8.Valid(text) {
			return nil, malformed("an error is not text")
		}
		return nil, diag.New(diag.DataRead, "the program that gives the batches has failed").
			Because("%s", strings.TrimSpace(string(text)))
	}
	return nil, malformed("there is no record of kind %d", kind)
}

// batch reads a batch of some bytes.
func (s *Stream) batch(r io.Reader, size uint32) (*Batch, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, truncated(err, "in a batch")
	}
	arrays, count := numbers32(head[:])[0], 0
	for i := range 5 {
		count += int(arrays >> i & 1)
	}
	if want := 4 + 4*uint64(count)*uint64(s.sequences)*uint64(s.seq); uint64(size) != want ||
		arrays >= 32 || arrays&1 == 0 {
		return nil, malformed("a batch of arrays %04b has %d bytes, and would have %d", arrays, size,
			want).Try("give ids of %d sequences of %d tokens", s.sequences, s.seq)
	}
	b := newBatch(s.sequences, s.seq)
	var mask []int32
	if arrays&hasMask != 0 {
		mask = make([]int32, len(b.IDs))
	}
	buf := make([]byte, 4*s.seq)
	for i, array := range [][]int32{b.IDs, b.Labels, b.Positions, b.Segments, mask} {
		if arrays>>i&1 == 0 {
			continue
		}
		for row := range slices.Chunk(array, s.seq) {
			if _, err := io.ReadFull(r, buf); err != nil {
				return nil, truncated(err, "in a batch")
			}
			for k := range row {
				row[k] = int32(binary.LittleEndian.Uint32(buf[4*k:]))
			}
		}
	}
	if err := s.complete(b, arrays, mask); err != nil {
		return nil, err
	}
	return b, nil
}

// Bits of the arrays that a batch may come without.
const (
	hasLabels = 1 << (iota + 1)
	hasPositions
	hasSegments
	hasMask
)

// complete fills in the arrays that a batch came without, and puts labels in their places.
func (s *Stream) complete(b *Batch, arrays uint32, mask []int32) error {
	for i := range b.IDs {
		first, bad := i%b.Seq == 0, ""
		if arrays&hasSegments == 0 && arrays&hasPositions != 0 && !first {
			b.Segments[i] = b.Segments[i-1]
			if b.Positions[i] == 0 {
				b.Segments[i]++
			}
		}
		if arrays&hasPositions == 0 && !first && b.Segments[i] == b.Segments[i-1] {
			b.Positions[i] = b.Positions[i-1] + 1
		}
		switch {
		case s.documents == 1 && (b.Segments[i] != 0 || int(b.Positions[i]) != i%b.Seq):
			bad = "is in another document or place, and the model takes sequences of one"
		case mask != nil && (mask[i]|1 != 1 || !first && mask[i] > mask[i-1]):
			bad = "has padding before it; the model takes padding behind a sequence only"
		}
		if bad != "" {
			return diag.New(diag.BadInput, "token %d of sequence %d %s", i%b.Seq, i/b.Seq, bad).
				Try("give each sequence as one document, padded on its right")
		}
	}
	for i := range b.IDs {
		last := i%b.Seq == b.Seq-1
		switch {
		case arrays&hasLabels != 0 && !s.shifts:
		case last || b.Segments[i+1] != b.Segments[i]:
			b.Labels[i] = Ignored
		case arrays&hasLabels != 0:
			b.Labels[i] = b.Labels[i+1]
		default:
			b.Labels[i] = b.IDs[i+1]
			if mask != nil && mask[i+1] == 0 {
				b.Labels[i] = Ignored
			}
		}
		b.Labels[i] = max(b.Labels[i], Ignored)
		if mask != nil && mask[i] == 0 && b.Labels[i] != Ignored {
			return diag.New(diag.BadInput, "token %d of sequence %d is padding and has a label", i%b.Seq,
				i/b.Seq).Try("give padding the label -100")
		}
		if b.Labels[i] != Ignored {
			b.Count++
		}
	}
	b.Total = b.Count
	return nil
}

// Take gives the next batch. A position may be as far back as the last batch; what lies between the
// stream and a later one is dropped. Where the data has ended, the error has the code
// [diag.DataEnd].
func (s *Stream) Take(ctx context.Context, at Position, rows, rank, ranks int) (*Batch, Position,
	error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := at[streamed]
	_, known := at[streamed]
	switch {
	case rank != 0 || ranks != 1 || rows != s.sequences:
		return nil, nil, diag.New(diag.BadInput, "a stream has batches of %d sequences for one reader",
			s.sequences)
	case len(at) > 1 || len(at) == 1 && !known || want < 0 || want%int64(rows) != 0:
		return nil, nil, diag.New(diag.DataPosition, "%v is not a position in a stream of %d sequences"+
			" a batch", at, rows).Try("go on with the data that the run began with")
	case s.last != nil && want == s.taken-int64(rows):
		return s.last.clone(), Position{streamed: s.taken}, nil
	case want < s.taken:
		return nil, nil, diag.New(diag.DataPosition, "a stream cannot go back from sequence %d to %d",
			s.taken, want).Try("run the same command again, with the batches from the first")
	}
	for s.taken <= want {
		select {
		case b, more := <-s.batches:
			if !more {
				return nil, nil, s.end
			}
			s.last, s.taken = b, s.taken+int64(rows)
		case <-ctx.Done():
			return nil, nil, wanted(ctx)
		}
	}
	return s.last.clone(), Position{streamed: s.taken}, nil
}

// clone copies a batch, since who takes one may change it.
func (b *Batch) clone() *Batch {
	c := newBatch(b.Sequences, b.Seq)
	copy(c.IDs, b.IDs)
	copy(c.Labels, b.Labels)
	copy(c.Positions, b.Positions)
	copy(c.Segments, b.Segments)
	c.Count, c.Total = b.Count, b.Total
	return c
}

// Documents is how many documents a sequence has at most, as the header says.
func (s *Stream) Documents() int64 { return s.documents }

// Close stops reading ahead.
func (s *Stream) Close() { s.close(errors.New("the stream is closed")) }

// numbers32 splits bytes into numbers.
func numbers32(b []byte) []uint32 {
	list := make([]uint32, len(b)/4)
	for i := range list {
		list[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return list
}

// malformed is the error of a stream that is not of its format.
func malformed(format string, args ...any) *diag.Error {
	return diag.New(diag.DataFormat, "the stream of batches is malformed: %s",
		fmt.Sprintf(format, args...))
}

// truncated is the error of a stream that ends where it must not. It does not wrap io.EOF, which
// ends a run.
func truncated(err error, where string) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return diag.New(diag.DataRead, "the stream of batches ends %s", where).
			Because("the program that writes it is gone").Try("run it again: it goes on from the newest" +
			" checkpoint")
	}
	return diag.New(diag.DataRead, "the stream of batches cannot be read").Wrap(err)
}
