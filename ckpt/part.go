package ckpt

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/safetensors"
)

// A planned part knows its place before its bytes are read.
type planned struct {
	tensor Tensor
	key    string // its name within the part file
	part   Part
}

// plan checks the slices and puts them in the order of the file: wider elements first, because the
// format has no padding and this order alone keeps every tensor aligned.
func (d *Draft) plan(file string, have []Tensor, list []Slice) ([]planned, error) {
	held := byName(have)
	if len(held) != len(have) {
		return nil, diag.New(diag.CheckpointTensor, "the source lists a tensor twice")
	}
	for _, t := range have {
		if err := checkTensor(t); err != nil {
			return nil, diag.New(diag.CheckpointTensor, "%s", err)
		}
	}
	if list == nil {
		for _, t := range have {
			list = append(list, Slice{t.Name, t.Box()})
		}
	}
	var parts []planned
	for _, s := range list {
		t, ok := held[s.Name]
		if !ok {
			return nil, absent(s.Name, have)
		}
		if err := t.checkBox(s.Box); err != nil {
			return nil, diag.New(diag.CheckpointTensor, "%s", err)
		}
		if n := t.sized(s.Box.Size); n > 0 {
			key := t.Name
			if !slices.Equal(s.Box.Size, t.Shape) {
				key += s.Box.String()
			}
			box := Box{slices.Clone(s.Box.Start), slices.Clone(s.Box.Size)}
			parts = append(parts, planned{t, key, Part{Box: box, File: file, Bytes: n}})
		}
	}
	lists.Sort(parts, func(a, b planned) int {
		return cmp.Or(cmp.Compare(b.tensor.DType.Bits(), a.tensor.DType.Bits()),
			strings.Compare(a.tensor.Name, b.tensor.Name),
			slices.Compare(a.part.Start, b.part.Start))
	})
	return parts, nil
}

// header writes the header of a part file. Package safetensors writes a whole file in order and
// hashes it once more; here parts are written at their places, side by side, and each has a hash of
// its own.
func header(parts []planned) ([]byte, error) {
	items, seen := make([]safetensors.Item, len(parts)), map[string]bool{}
	for i, p := range parts {
		if seen[p.key] {
			return nil, diag.New(diag.CheckpointTensor, "two slices would be called %s", human.Quote(p.key))
		}
		seen[p.key] = true
		items[i] = safetensors.Item{Name: p.key, Data: safetensors.FromBytes(nil),
			Shape: dtype.Shape{Type: p.tensor.DType, Dims: p.part.Size}}
	}
	head, _, err := safetensors.Header(items, nil)
	return head, err
}

// writeFile writes and syncs one part file and fills in the hashes of its parts.
func (d *Draft) writeFile(ctx context.Context, file File, head []byte, parts []planned,
	src Source) error {
	disk := d.opts.disk
	f, err := disk.create(filepath.Join(d.temp, file.Name))
	if err != nil {
		return err
	}
	bar := &progress{events: d.opts.Events, task: fmt.Sprintf("checkpoint of step %d", d.step),
		total: file.Bytes}
	err = disk.writeAt(f, head, 0)
	if err == nil {
		err = spread(ctx, d.opts.Workers, len(parts), d.buffer(parts), func(i int, buf []byte) error {
			return writePart(ctx, disk, f, &parts[i], src, buf, bar)
		})
	}
	if err != nil {
		f.Close()
		return err
	}
	return disk.sync(f)
}

// buffer is how much of a tensor is in memory at a time.
func (d *Draft) buffer(parts []planned) int64 {
	largest := lists.Max(parts, 0, func(p planned) int64 { return p.part.Bytes })
	return cmp.Or(d.opts.chunk, min(largest, chunkBytes))
}

// writePart writes one box of a tensor to its place in a part file, in chunks, and hashes it.
func writePart(ctx context.Context, disk disk, f *os.File, p *planned, src Source, buf []byte,
	bar *progress) error {
	sum, at := sha256.New(), p.part.Offset
	for box := range p.tensor.chunks(p.part.Box, int64(len(buf))) {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := buf[:p.tensor.sized(box.Size)]
		if err := src.ReadSlice(p.tensor.Name, box, b); err != nil {
			return fmt.Errorf("read %s %v: %w", human.Quote(p.tensor.Name), box, err)
		}
		sum.Write(b)
		if err := disk.writeAt(f, b, at); err != nil {
			return err
		}
		at += int64(len(b))
		bar.add(int64(len(b)))
	}
	p.part.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// A progress bar tells of every twentieth of the work, or of every 256 MiB if that is more: a
// checkpoint is one line of a log, not a thousand.
type progress struct {
	mu                    sync.Mutex
	events                event.Sink
	task                  string
	done, reported, total int64
}

// add counts bytes and reports progress now and then.
func (p *progress) add(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	if p.done-p.reported >= max(p.total/20, 256<<20) {
		p.reported = p.done
		p.events.Emit(event.Progress{Task: p.task, Done: p.done, Total: p.total, Unit: "B"})
	}
}
