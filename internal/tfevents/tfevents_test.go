package tfevents

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/golden"
)

// clock ticks one second and a bit at every look.
func clock() event.Clock {
	at := time.Date(2026, 11, 15, 12, 0, 0, 0, time.UTC)
	return func() time.Time { at = at.Add(1250 * time.Millisecond); return at }
}

// write makes the files of a run of 8 steps that was killed after step 6 and resumed at step 4.
func write(t *testing.T, dir string) {
	now := clock()
	run := func(resumed bool, from, to int) {
		w, err := Create(dir, now)
		if err != nil {
			t.Fatal(err)
		}
		if resumed {
			w.Emit(event.Resumed{Step: from - 1, Path: "x"})
		}
		for s := from; s <= to; s++ {
			loss := 4 / float64(s)
			if !resumed {
				loss += 0.25 // so that what was taken back can be distinguished from what counts
			}
			w.Emit(event.Step{Step: s, Steps: 8, Loss: event.Figure(loss), GradNorm: event.Figure(0.5 * float64(s)), Rate: 3e-4,
				TokensPerSecond: 4010, MFU: 0.375, MemoryBytes: 3 << 29})
			if s%2 == 0 {
				w.Emit(event.Eval{Step: s, Loss: event.Figure(loss + 1), Tokens: 10})
			}
		}
		w.Emit(event.Note{Text: "no curve"})
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	run(false, 1, 6)
	run(true, 5, 8)
}

// want is what a reader must show of the run above.
func want() map[string][][2]float64 {
	m := map[string][][2]float64{}
	for s := 1; s <= 8; s++ {
		loss := 4 / float64(s)
		if s <= 4 {
			loss += 0.25
		}
		add := func(tag string, v float64) {
			m[tag] = append(m[tag], [2]float64{float64(s), float64(float32(v))})
		}
		add("train/loss", loss)
		add("train/grad_norm", 0.5*float64(s))
		add("train/rate", 3e-4)
		add("train/tokens_per_second", 4010)
		add("train/mfu", 0.375)
		add("train/memory_gib", 1.5)
		if s%2 == 0 {
			add("eval/loss", loss+1)
		}
	}
	return m
}

// The committed files were read by TensorBoard 2.21.0 itself: testdata/read.py (its first lines say
// how to run it) wrote what it saw, and the digests of the files that it saw it in, to
// testdata/seen.json. Here the writer is held to those files, byte by byte, and what was seen to
// what was written.
func TestTensorBoardReadsIt(t *testing.T) {
	dir := t.TempDir()
	write(t, dir)
	if golden.Update() {
		old, _ := filepath.Glob("testdata/run/*")
		for _, path := range old {
			os.Remove(path)
		}
		write(t, "testdata/run")
	}
	var seen struct {
		Digests map[string]string       `json:"sha256"`
		Scalars map[string][][2]float64 `json:"scalars"`
	}
	text, err := os.ReadFile("testdata/seen.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &seen); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	paths, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		committed, err := os.ReadFile(filepath.Join("testdata", "run", filepath.Base(path)))
		if err != nil || !bytes.Equal(b, committed) {
			t.Errorf("%s is not what is committed (%v)", filepath.Base(path), err)
		}
		digest := sha256.Sum256(b)
		got[filepath.Base(path)] = hex.EncodeToString(digest[:])
	}
	if diff := cmp.Diff(seen.Digests, got); diff != "" {
		t.Errorf("TensorBoard has not seen these files; run testdata/read.py:\n%s", diff)
	}
	if diff := cmp.Diff(want(), seen.Scalars); diff != "" {
		t.Errorf("TensorBoard sees (+) other figures than were written (-):\n%s", diff)
	}
}

// The check value of CRC-32C over "123456789" is 0xe3069283.
func TestChecksum(t *testing.T) {
	const crc = 0xe3069283
	var rotated uint32 = crc>>15 | (crc<<17)&0xffffffff
	if got := masked([]byte("123456789")); got != rotated+0xa282ead8 {
		t.Errorf("%#x", got)
	}
}

func TestRestartWithinASecond(t *testing.T) {
	dir, now := t.TempDir(), clock()()
	var paths []string
	for range 3 {
		w, err := Create(dir, func() time.Time { return now })
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, w.f.Name())
		w.Close()
	}
	if !slices.IsSorted(paths) || len(slices.Compact(paths)) != 3 {
		t.Errorf("TensorBoard would not read these in order: %v", paths)
	}
}

func TestErrorsAreKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(file, clock()); err == nil {
		t.Error("a file was taken for a folder")
	}
	w, err := Create(t.TempDir(), clock())
	if err != nil {
		t.Fatal(err)
	}
	w.f.Close()
	w.Emit(event.Eval{Step: 1, Loss: event.Figure(math.NaN())})
	if w.Close() == nil {
		t.Error("a lost figure is not reported")
	}
}
