package quantize

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
)

// A Report is what became of a checkpoint; it is written as quantize.json.
type Report struct {
	Version int          `json:"version"`
	Format  dtype.Format `json:"format"`
	Layout  Layout       `json:"layout"`
	// Key identifies source and options: the same key means the same bytes.
	Key      string   `json:"key"`
	BytesIn  int64    `json:"bytes_in"`
	BytesOut int64    `json:"bytes_out"`
	Files    []string `json:"files"`
	Tensors  []Tensor `json:"tensors"`
}

// A Tensor is what became of one tensor of the source.
type Tensor struct {
	Name   string       `json:"name"`
	Type   dtype.DType  `json:"type"`
	Shape  []int64      `json:"shape"`
	Format dtype.Format `json:"format"`
	// Kept is why it stays as it is; "" for one that is quantized.
	Kept string `json:"kept,omitempty"`
	// Compared is the number of elements that the figures cover; Amax covers all. Of large tensors it
	// is one block in 17.
	Compared int64 `json:"compared,omitempty"`
	// SNR is the ratio of signal to noise in decibels; nil for one without noise.
	SNR   *float64 `json:"snr_db,omitempty"`
	Power float64  `json:"power,omitempty"` // sum of squares
	Noise float64  `json:"noise,omitempty"` // sum of the errors' squares
	Amax  float64  `json:"amax,omitempty"`
	// Zeros is the share of elements that were zero before, Underflow the share that became zero.
	Zeros     float64 `json:"zeros,omitempty"`
	Underflow float64 `json:"underflow,omitempty"`
	// GlobalScale is NVFP4's tensor scale, as the layout defines it.
	GlobalScale float64 `json:"global_scale,omitempty"`
}

// A layer is the row of one layer in the text.
type layer struct {
	count        int
	power, noise float64
	elements     float64
	underflow    float64
	worst        *Tensor
}

// WriteText prints the report for a person: one line a layer, and what was kept and why.
func (r *Report) WriteText(w io.Writer) error {
	layers := map[int]*layer{}
	var all layer
	reasons := map[string]*layer{}
	for i := range r.Tensors {
		t := &r.Tensors[i]
		if t.Kept != "" {
			if reasons[t.Kept] == nil {
				reasons[t.Kept] = &layer{}
			}
			reasons[t.Kept].add(t)
			continue
		}
		n := number(t.Name)
		if layers[n] == nil {
			layers[n] = &layer{}
		}
		layers[n].add(t)
		all.add(t)
	}
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "LAYER\tWEIGHTS\tSNR dB\tWORST\t\tUNDERFLOW")
	for _, n := range slices.Sorted(maps.Keys(layers)) {
		name := strconv.Itoa(n)
		if n < 0 {
			name = "-"
		}
		layers[n].print(out, name)
	}
	if len(layers) > 1 {
		all.print(out, "all")
	}
	fmt.Fprintln(out)
	fmt.Fprintln(out, "KEPT\tTENSORS\tSIZE")
	byCount := func(a, b string) int {
		return cmp.Or(reasons[b].count-reasons[a].count, strings.Compare(a, b))
	}
	for _, why := range slices.SortedFunc(maps.Keys(reasons), byCount) {
		var size int64
		for _, t := range r.Tensors {
			if t.Kept == why {
				size += dtype.Shape{Type: t.Type, Dims: t.Shape}.Bytes()
			}
		}
		fmt.Fprintf(out, "%s\t%d\t%s\n", brief(why), reasons[why].count, event.Size(size))
	}
	return out.Flush()
}

// brief truncates a reason to the width of a table column; quantize.json has all of it.
func brief(why string) string {
	const most = 60
	if r := []rune(why); len(r) > most {
		return strings.TrimSpace(string(r[:most-1])) + "…"
	}
	return why
}

func (l *layer) add(t *Tensor) {
	l.count++
	n := float64(dtype.Shape{Type: t.Type, Dims: t.Shape}.Elements())
	if t.Compared > 0 {
		whole := n / float64(t.Compared)
		l.power, l.noise = l.power+t.Power*whole, l.noise+t.Noise*whole
	}
	l.elements, l.underflow = l.elements+n, l.underflow+n*t.Underflow
	if t.SNR != nil && (l.worst == nil || *t.SNR < *l.worst.SNR) {
		l.worst = t
	}
}

func (l *layer) print(w io.Writer, name string) {
	snr, worst, module := "exact", "", ""
	if db := decibel(l.power, l.noise); db != nil {
		snr = fmt.Sprintf("%.2f", *db)
	}
	if l.worst != nil {
		worst = fmt.Sprintf("%.2f", *l.worst.SNR)
		module = strings.TrimSuffix(l.worst.Name, ".weight")
	}
	fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%.2f %%\n", name, l.count, snr, worst, module,
		100*l.underflow/max(l.elements, 1))
}

// number is the layer of a tensor: the first number in its name, or -1.
func number(name string) int {
	for part := range strings.SplitSeq(name, ".") {
		if n, err := strconv.Atoi(part); err == nil && n >= 0 {
			return n
		}
	}
	return -1
}
