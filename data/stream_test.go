package data

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// written is a stream of numbers and texts.
func written(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			b = append(b, p...)
		case int:
			b = binary.LittleEndian.AppendUint32(b, uint32(p))
		case []int32:
			for _, n := range p {
				b = binary.LittleEndian.AppendUint32(b, uint32(n))
			}
		case []byte:
			b = append(b, p...)
		}
	}
	return b
}

// headed is the header of streams in tests: two sequences of three tokens, of two documents.
func headed() []byte { return written(streamMagic, 1, 2, 3, 2, 0) }

func TestStream(t *testing.T) {
	ids := []int32{1, 2, 3, 4, 5, 6}
	whole := written(headed(), recordBatch, 4+24, 1, ids,
		recordBatch, 4+72, 1|2|8, ids, []int32{2, -1, 7, 8, 9, -1}, []int32{0, 0, 1, 0, 1, 1},
		recordEnd, 0)
	s, err := NewStream(t.Context(), bytes.NewReader(whole), 2, 3)
	if err != nil || s.Documents() != 2 {
		t.Fatal(s, err)
	}
	defer s.Close()
	b, after, err := s.Take(t.Context(), nil, 2, 0, 1)
	if err != nil || !slices.Equal(b.IDs, ids) || after[streamed] != 2 || b.Count != 4 ||
		!slices.Equal(b.Labels, []int32{2, 3, -1, 5, 6, -1}) ||
		!slices.Equal(b.Positions, []int32{0, 1, 2, 0, 1, 2}) {
		t.Fatalf("%+v %v %v", b, after, err)
	}
	b.IDs[0] = 99 // it is the caller's
	if b, _, err = s.Take(t.Context(), Position{}, 2, 0, 1); err != nil || b.IDs[0] != 1 {
		t.Fatalf("again: %+v %v", b, err)
	}
	b, after, err = s.Take(t.Context(), after, 2, 0, 1)
	if err != nil || after[streamed] != 4 || !slices.Equal(b.Positions, []int32{0, 1, 0, 0, 0, 1}) ||
		!slices.Equal(b.Segments, []int32{0, 0, 1, 0, 1, 1}) || b.Count != 4 {
		t.Fatalf("%+v %v %v", b, after, err)
	}
	for range 2 {
		if _, _, err := s.Take(t.Context(), after, 2, 0, 1); !errors.Is(err, diag.DataEnd) {
			t.Fatal(err)
		}
	}
	for _, at := range []Position{{}, {streamed: 3}, {"data": 2}, {streamed: -2}, {streamed: 4, "x": 1}} {
		if _, _, err := s.Take(t.Context(), at, 2, 0, 1); !errors.Is(err, diag.DataPosition) {
			t.Errorf("%v: %v", at, err)
		}
	}
	// A run that resumes is given everything again, and drops what it has had.
	s, err = NewStream(t.Context(), bytes.NewReader(whole), 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	if b, _, err = s.Take(t.Context(), Position{streamed: 2}, 2, 0, 1); err != nil || b.Labels[2] != 7 {
		t.Fatalf("resumed: %+v %v", b, err)
	}
}

// Labels are next tokens, moved, or neither, and padding has none.
func TestStreamedLabels(t *testing.T) {
	ids := []int32{1, 2, 3, 4, 5, 6}
	for name, one := range map[string]struct {
		shifts int
		arrays []byte
		want   []int32
	}{
		"none":      {0, written(28, 1, ids), []int32{2, 3, -1, 5, 6, -1}},
		"moved":     {1, written(52, 3, ids, []int32{-100, 2, 3, 4, -100, 6}), []int32{2, 3, -1, -1, 6, -1}},
		"as is":     {0, written(52, 3, ids, []int32{7, 8, -100, 9, -5, 3}), []int32{7, 8, -1, 9, -1, 3}},
		"padded":    {0, written(52, 17, ids, []int32{1, 1, 0, 1, 0, 0}), []int32{2, -1, -1, -1, -1, -1}},
		"positions": {0, written(52, 5, ids, []int32{0, 0, 1, 0, 1, 2}), []int32{-1, 3, -1, 5, 6, -1}},
	} {
		text := written(streamMagic, 1, 2, 3, 2, one.shifts, recordBatch, one.arrays)
		s, err := NewStream(t.Context(), bytes.NewReader(text), 2, 3)
		if err != nil {
			t.Fatal(err)
		}
		b, _, err := s.Take(t.Context(), nil, 2, 0, 1)
		if err != nil || !slices.Equal(b.Labels, one.want) {
			t.Errorf("%s: %+v %v", name, b, err)
		}
		s.Close()
	}
}

func TestStreamsThatAreRefused(t *testing.T) {
	ids := []int32{1, 2, 3, 4, 5, 6}
	for name, one := range map[string]struct {
		bytes []byte
		code  diag.Code
	}{
		"nothing":            {nil, diag.DataRead},
		"half a header":      {headed()[:9], diag.DataRead},
		"no stream":          {bytes.Repeat([]byte("x"), 99), diag.DataFormat},
		"another version":    {written(streamMagic, 2, 2, 3, 2, 0), diag.DataFormat},
		"another batch":      {written(streamMagic, 1, 4, 3, 2, 0), diag.DataFormat},
		"another seq":        {written(streamMagic, 1, 2, 4, 2, 0), diag.DataFormat},
		"no documents":       {written(streamMagic, 1, 2, 3, 0, 0), diag.DataFormat},
		"too many documents": {written(streamMagic, 1, 2, 3, 4, 0), diag.DataFormat},
		"no end":             {headed(), diag.DataRead},
		"half a record":      {written(headed(), 1)[:31], diag.DataRead},
		"half a batch":       {written(headed(), 1, 28, 1, ids[:3]), diag.DataRead},
		"an unknown kind":    {written(headed(), 4, 0), diag.DataFormat},
		"a large batch":      {written(headed(), 1, -1, 1, ids), diag.DataFormat},
		"no ids":             {written(headed(), 1, 28, 2, ids), diag.DataFormat},
		"unknown arrays":     {written(headed(), 1, 52, 33, ids, ids), diag.DataFormat},
		"an end with bytes":  {written(headed(), 2, 1), diag.DataFormat},
		"another shift":      {written(streamMagic, 1, 2, 3, 2, 2), diag.DataFormat},
		"padding before": {written(headed(), 1, 52, 17, ids, []int32{0, 1, 1, 1, 1, 1}),
			diag.BadInput},
		"a strange mask": {written(headed(), 1, 52, 17, ids, []int32{2, 1, 1, 1, 1, 1}), diag.BadInput},
		"labels of padding": {written(headed(), 1, 76, 19, ids, ids, []int32{1, 1, 0, 1, 1, 1}),
			diag.BadInput},
		"an error":      {written(headed(), 3, 4, "gone"), diag.DataRead},
		"half an error": {written(headed(), 3, 4, "go"), diag.DataRead},
		"a large error": {written(headed(), 3, 1<<20), diag.DataFormat},
		"no text":       {written(headed(), 3, 1, "\xff"), diag.DataFormat},
		"segments of one": {written(streamMagic, 1, 2, 3, 1, 0, 1, 52, 9, ids, ids),
			diag.BadInput},
	} {
		s, err := NewStream(t.Context(), bytes.NewReader(one.bytes), 2, 3)
		if err == nil {
			_, _, err = s.Take(t.Context(), nil, 2, 0, 1)
			s.Close()
		}
		if !errors.Is(err, one.code) || errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whoever waits for a batch stops waiting when nobody wants it, and at most a few are read ahead.
func TestStreamWaits(t *testing.T) {
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewStream(ctx, r, 2, 3); !errors.Is(err, diag.Canceled) {
		t.Error(err)
	}
	r, w = io.Pipe()
	sent := make(chan int)
	go func() {
		_, _ = w.Write(headed())
		n := 0
		for ; n < 100; n++ {
			if _, err := w.Write(written(1, 28, 1, []int32{1, 2, 3, 4, 5, 6})); err != nil {
				break
			}
		}
		sent <- n
	}()
	s, err := NewStream(t.Context(), r, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	s.Close()
	if n := <-sent; n > ahead+1 {
		t.Errorf("%d batches were read ahead", n)
	}
	r, w = io.Pipe()
	go func() { _, _ = w.Write(headed()) }()
	if s, err = NewStream(t.Context(), r, 2, 3); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, _, err = s.Take(ctx, nil, 2, 0, 1); !errors.Is(err, diag.Canceled) {
		t.Error(err)
	}
}

func FuzzStream(f *testing.F) {
	f.Add(written(headed(), 1, 28, 1, []int32{1, 2, 3, 4, 5, 6}, 2, 0))
	f.Add(written(headed(), 3, 4, "gone"))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := NewStream(t.Context(), bytes.NewReader(text), 2, 3)
		at := Position{}
		for n := 0; err == nil; n++ {
			if n > len(text) {
				t.Fatal("more batches than bytes")
			}
			var b *Batch
			if b, at, err = s.Take(t.Context(), at, 2, 0, 1); err == nil && len(b.IDs) != 6 {
				t.Fatal(b)
			}
		}
		if diag.From(err).Code == diag.Internal {
			t.Fatal(err)
		}
	})
}
