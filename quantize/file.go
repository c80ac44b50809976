package quantize

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/parallel"
	"github.com/deepwell/deepwell/internal/plainfile"
	"github.com/deepwell/deepwell/safetensors"
)

// A file is one file of the output: what it holds, and where.
type file struct {
	name    string
	works   []work
	outputs map[string]*output // by name
	header  []byte
	size    int64
	rows    []Tensor // when it is done
}

// splitFiles splits the work into files, in its order.
func splitFiles(works []work, limit int64) ([]*file, error) {
	var files []*file
	held := int64(0)
	for _, w := range works {
		size := lists.Sum(w.outputs(), func(o *output) int64 { return o.shape.Bytes() })
		if len(files) == 0 || held > 0 && size > limit-held {
			files, held = append(files, &file{}), 0
		}
		f := files[len(files)-1]
		f.works = append(f.works, w)
		held += size
	}
	for i, f := range files {
		f.name = safetensors.FileName(i, len(files))
		if err := f.arrange(); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// arrange assigns offsets to all outputs. Package safetensors writes files from beginning to end;
// here a tensor's scales are computed together with its elements but are stored far apart, so
// chunks are written at their offsets.
func (f *file) arrange() error {
	f.outputs = map[string]*output{}
	var items []safetensors.Item
	for _, w := range f.works {
		for _, o := range w.outputs() {
			f.outputs[o.name] = o
			items = append(items, safetensors.Item{Name: o.name, Shape: o.shape,
				Data: safetensors.FromBytes(nil)})
		}
	}
	safetensors.Sort(items)
	header, _, err := safetensors.Header(items, map[string]string{"format": "pt"})
	f.header, f.size = header, int64(len(header))
	for _, item := range items {
		f.outputs[item.Name].at = f.size
		f.size += item.Shape.Bytes()
	}
	return err
}

// run writes the files that are not there yet. While the disk takes the end of one, the next is
// being filled.
func (j *job) run(ctx context.Context, folder *outFolder) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	turn := make(chan struct{}, 1) // held by the one that is filled
	slots := make(chan struct{}, 2)
	var wg sync.WaitGroup
	j.meter = meter{events: j.Events, total: j.total}
	for _, f := range j.files {
		if folder.has(f) {
			j.meter.add(f.source())
			continue
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := j.file(ctx, f, folder, turn); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	err := context.Cause(ctx)
	if ctx.Err() == nil {
		return nil
	}
	if _, ok := err.(*diag.Error); !ok { //nolint:errorlint // a wrapped one has no place here
		err = diag.New(diag.Canceled, "stopped; the same command goes on where it stopped").Wrap(err)
	}
	return err
}

// file writes one file and then says that it is there.
func (j *job) file(ctx context.Context, f *file, folder *outFolder, turn chan struct{}) error {
	path := filepath.Join(j.out, f.name)
	var rows []Tensor
	err := atomicfile.WriteFunc(path, 0o644, func(w io.Writer) (err error) {
		turn <- struct{}{}
		defer func() { <-turn }()
		rows, err = j.fill(ctx, f, w.(*os.File))
		return err
	})
	if err != nil {
		if _, ok := err.(*diag.Error); ok || ctx.Err() != nil { //nolint:errorlint // as above
			return err
		}
		return unwritten(path, err)
	}
	f.rows = rows
	return folder.writeJSON(filepath.Join(StateName, f.name+".json"), f.rows) // it is done
}

// source is the size of the tensors that a file is made of.
func (f *file) source() (n int64) {
	for _, w := range f.works {
		t := w.row(sums{})
		n += dtype.Shape{Type: t.Type, Dims: t.Shape}.Bytes()
	}
	return n
}

// A task is one chunk of one work: finding its amax, or quantizing it.
type task struct {
	at      int // of the work in the file
	work    work
	chunk   int
	measure bool
}

// tasks lists the chunks of a file in the order in which they start. The amax of a group is
// searched while the group before it is written, so that the disk reads and writes at once, and
// chunks read then need not be read again, or are still in memory.
func (f *file) tasks() []task {
	var units [][]task // measuring, doing, measuring, doing
	seen := map[*group]int{}
	for at, w := range f.works {
		unit := -1
		var look []task
		if b, ok := w.(*quantizedMatrix); ok && b.group != nil {
			if i, ok := seen[b.group]; ok {
				unit = i
			} else {
				b.group.once.Do(func() { look = b.group.tasks() })
				seen[b.group] = len(units)
			}
		}
		if unit < 0 {
			unit = len(units)
			units = append(units, look, nil)
		}
		for chunk := range w.chunks() {
			units[unit+1] = append(units[unit+1], task{at: at, work: w, chunk: chunk})
		}
	}
	list := units[0]
	for i := 1; i < len(units); i += 2 {
		var ahead []task
		if i+1 < len(units) {
			ahead = units[i+1]
		}
		list = mix(list, ahead, units[i])
	}
	return list
}

// mix appends two lists so that they go on side by side, each in its order.
func mix(list, a, b []task) []task {
	for len(a)+len(b) > 0 {
		if len(a) >= len(b) {
			list, a = append(list, a[0]), a[1:]
		} else {
			list, b = append(list, b[0]), b[1:]
		}
	}
	return list
}

// tasks lists the measuring of a group.
func (g *group) tasks() (list []task) {
	for _, w := range g.members {
		for chunk := range w.chunks() {
			list = append(list, task{work: w, chunk: chunk, measure: true})
		}
	}
	return list
}

// fill writes the header and all chunks. Statistics are summed in chunk order, so that they do not
// depend on which worker was faster.
func (j *job) fill(ctx context.Context, f *file, to *os.File) ([]Tensor, error) {
	if err := to.Truncate(f.size); err != nil {
		return nil, err
	}
	if _, err := to.WriteAt(f.header, 0); err != nil {
		return nil, err
	}
	list := f.tasks()
	found := lists.Map(f.works, func(w work) []sums { return make([]sums, w.chunks()) })
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	disk := &flusher{f: to}
	err := parallel.Each(j.Workers, len(list), func() func(int) error {
		b := buffers{shelf: j.shelf}
		return func(i int) error {
			err := context.Cause(ctx)
			if err == nil {
				err = j.task(ctx, list[i], found, &b, disk)
			}
			if err != nil {
				cancel(err) // for those that wait for it
			}
			return err
		}
	})
	if err != nil {
		return nil, err
	}
	rows := make([]Tensor, len(f.works))
	for i, w := range f.works {
		var all sums
		for _, s := range found[i] {
			all.add(s)
		}
		rows[i] = w.row(all)
	}
	return rows, nil
}

// A flusher writes chunks, and starts write-back of large ones at once.
type flusher struct{ f *os.File }

// WriteAt writes a chunk at its offset.
func (w *flusher) WriteAt(p []byte, at int64) (int, error) {
	n, err := w.f.WriteAt(p, at)
	if err == nil && n >= band/4 {
		plainfile.Flush(w.f, at, int64(n))
	}
	return n, err
}

func (j *job) task(ctx context.Context, t task, found [][]sums, b *buffers, to io.WriterAt) error {
	w, _ := t.work.(*quantizedMatrix)
	if t.measure {
		return w.measure(t.chunk, b)
	}
	if w != nil && w.group != nil {
		select {
		case <-w.group.known:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	s, err := t.work.do(t.chunk, b, to)
	if err != nil {
		return err
	}
	found[t.at][t.chunk] = s
	j.meter.add(b.taken)
	return nil
}

// A meter tells how far the work is, at most once every some megabytes.
type meter struct {
	events      event.Sink
	total       int64
	done, shown atomic.Int64
}

func (m *meter) add(n int64) {
	const every = 64 << 20
	done := m.done.Add(n)
	shown := m.shown.Load()
	if done-shown >= every && m.shown.CompareAndSwap(shown, done) {
		m.events.Emit(event.Progress{Task: "quantize", Done: done, Total: m.total, Unit: "B"})
	}
}
