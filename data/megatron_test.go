package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// megatronFiles writes documents as Megatron-LM does, each as two sequences.
func megatronFiles(code byte, lazy, modes bool, docs [][]int64) (idx, bin []byte) {
	size := int(megatronTypes[uint64(code)].size)
	var lengths, places, first []int64
	for _, d := range docs {
		first = append(first, int64(len(lengths)))
		for _, part := range [][]int64{d[:len(d)/2], d[len(d)/2:]} {
			places = append(places, int64(len(bin)))
			lengths = append(lengths, int64(len(part)))
			for _, id := range part {
				bin = append(bin, binary.LittleEndian.AppendUint64(nil, uint64(id))[:size]...)
			}
		}
	}
	first = append(first, int64(len(lengths)))
	longs := func(list []int64) {
		for _, v := range list {
			idx = binary.LittleEndian.AppendUint64(idx, uint64(v))
		}
	}
	if lazy {
		idx = append(idx, magicLazy...)
		longs([]int64{1, int64(code), int64(size), int64(len(lengths)), int64(len(lengths)), int64(len(first))})
		for i := range lengths {
			places[i] /= int64(size)
			longs([]int64{int64(i)})
		}
		longs([]int64{int64(len(lengths))})
		longs(append(places, int64(len(bin)/size)))
		longs(lengths)
		longs(first)
		return idx, bin
	}
	idx = append(idx, magicMapped...)
	longs([]int64{1})
	idx = append(idx, code)
	longs([]int64{int64(len(lengths)), int64(len(first))})
	for _, n := range lengths {
		idx = binary.LittleEndian.AppendUint32(idx, uint32(n))
	}
	longs(places)
	longs(first)
	if modes {
		idx = append(idx, make([]byte, len(lengths))...)
	}
	return idx, bin
}

func TestMegatron(t *testing.T) {
	docs := [][]int64{{20, 21, 22, 0}, {}, {30}, {40, 41}}
	want := []int32{20, 21, 22, 0, 30, 0, 40, 41, 0} // the end token, where it was missing
	for code := range megatronTypes {
		for _, form := range []struct{ lazy, modes bool }{{}, {lazy: true}, {modes: true}} {
			idx, bin := megatronFiles(byte(code), form.lazy, form.modes, docs)
			dir := write(t, map[string]string{"c_text_document.idx": string(idx), "c_text_document.bin": string(bin)})
			l, err := tryOpen(t, Options{Sources: []Source{{Path: dir + "/c_text_document"}}, Seq: 4})
			if err != nil {
				t.Errorf("code %d, %+v: %v", code, form, err)
				continue
			}
			c := l.sources[0].cache
			var got []int32
			for i := range c.tokens {
				got = append(got, c.token(i))
			}
			if !slices.Equal(got, want) || c.documents != 3 || c.start(1) != 4 || c.start(2) != 6 {
				t.Errorf("code %d, %+v: %d documents of %v", code, form, c.documents, got)
			}
		}
	}
}

func TestMegatronThatCannotBe(t *testing.T) {
	idx, bin := megatronFiles(8, false, false, [][]int64{{20, 21, 22, 0}})
	change := func(at int, v byte) string {
		b := slices.Clone(idx)
		b[at] = v
		return string(b)
	}
	for _, tt := range []struct{ name, idx, bin, want string }{
		{"magic", change(0, 'X'), string(bin), "does not begin with"},
		{"version", change(9, 2), string(bin), "version 2"},
		{"floats", change(17, 7), string(bin), "code 7"},
		{"count", change(25, 0x7f), string(bin), "unexpected EOF"},
		{"place", change(len(idx)-16-8, 0xff), string(bin), "outside the .bin|ends at byte"},
		{"documents", change(len(idx)-8, 9), string(bin), "sequences 0 to 9"},
		{"short .bin", string(idx), string(bin[:6]), "outside the .bin|ends at byte"},
		{"long", string(idx) + "x", string(bin), "too many"},
		{"empty", "", "", "does not begin with"},
		{"vocabulary", string(idx), string([]byte{20, 0, 21, 0, 0xff, 0xff, 0, 0}), "not one of the tokenizer's"},
	} {
		dir := write(t, map[string]string{"x.idx": tt.idx, "x.bin": tt.bin})
		_, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Seq: 2})
		ok := false
		for part := range strings.SplitSeq(tt.want, "|") {
			ok = ok || err != nil && strings.Contains(diag.From(err).Format(), part)
		}
		if e, is := errors.AsType[*diag.Error](err); !ok || !is || e.Code != diag.DataFormat && e.Code != diag.DataTokenizer {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	// Sequences that lie over each other would make much of little.
	idx, bin = megatronFiles(8, false, false, [][]int64{{20, 21, 22, 0}})
	clear(idx[34+8 : 34+8+16])
	if _, err := parseMegatron(idx, int64(len(bin))); err != nil {
		t.Error(err) // all that is there, though not once each
	}
	binary.LittleEndian.PutUint32(idx[34:], 4)
	if _, err := parseMegatron(idx, int64(len(bin))); err == nil || !strings.Contains(err.Error(), "an earlier one") {
		t.Errorf("got %v", err)
	}
	// Negative numbers are no tokens.
	idx, bin = megatronFiles(4, false, false, [][]int64{{-1, 2}})
	dir := write(t, map[string]string{"x.idx": string(idx), "x.bin": string(bin)})
	if _, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Seq: 1}); err == nil || !strings.Contains(err.Error(), "-1 is not a token") {
		t.Errorf("got %v", err)
	}
}

func FuzzMegatron(f *testing.F) {
	for _, code := range []byte{1, 3, 4, 5, 8} {
		for _, lazy := range []bool{false, true} {
			idx, bin := megatronFiles(code, lazy, false, [][]int64{{1, 2, 3}, {4}})
			f.Add(idx, bin)
		}
	}
	f.Fuzz(func(t *testing.T, idx, bin []byte) {
		x, err := parseMegatron(idx, int64(len(bin)))
		if err != nil {
			return
		}
		for d := range min(x.documents, 1000) {
			ids, read, err := x.document(readerAt(bin), d)
			if err != nil && !strings.Contains(err.Error(), "not a token") && !strings.Contains(err.Error(), "more than") {
				t.Fatalf("document %d: %v", d, err)
			}
			if read > int64(len(bin)) || slices.ContainsFunc(ids, func(id int32) bool { return id < 0 }) {
				t.Fatalf("document %d reads up to %d of %d: %v", d, read, len(bin), ids)
			}
		}
	})
}

type readerAt []byte

func (r readerAt) ReadAt(b []byte, at int64) (int, error) {
	if at < 0 || at > int64(len(r)) || int64(len(b)) > int64(len(r))-at {
		return 0, fmt.Errorf("%d bytes at %d of %d", len(b), at, len(r))
	}
	return copy(b, r[at:]), nil
}
