package dryrun

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/svg"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// The measures of the picture of memory.
const (
	memoryHeight  = 240.0
	memoryBuckets = 480
)

// memory draws what the rank with the highest peak holds over the step, and the peaks of all.
func (p page) memory(t *Timeline, capacity int64) {
	peak, rank := t.Peak()
	p.Head("Memory by cause", fmt.Sprintf(
		"What each device of rank %d holds over the step, the most of all ranks.", rank))
	p.Add(`<div class="key">`)
	for i, c := range shown(program.Memory{}) {
		p.Add(`<span><i class="c%d"></i>%s</span>`, i+1, c.Name)
	}
	p.Add("</div>")
	top := 1.1 * float64(max(peak.Sum(), capacity, 1))
	p.Add(`<figure><svg viewBox="0 0 %s %s" role="img" aria-label="memory of rank %d over the step">`,
		svg.Px(pictureWidth), svg.Px(memoryHeight+axisHeight+8), rank)
	at := func(bytes float64) float64 { return 8 + memoryHeight*(1-bytes/top) }
	step := svg.Step(top / (1 << 30) / 6)
	for g := 0.0; g*(1<<30) < top; g += step {
		y := at(g * (1 << 30))
		p.Add(`<path class="grid" d="M%s %sh%s"/><text x="%s" y="%s" class="end">%s</text>`,
			svg.Px(plotLeft), svg.Px(y), svg.Px(plotWidth), svg.Px(plotLeft-8), svg.Px(y+4),
			strconv.FormatFloat(g, 'g', 4, 64)+" GiB")
	}
	samples := buckets(t.Memory(rank), t.ticks)
	below := make([]float64, len(samples))
	for i := range shown(program.Memory{}) {
		p.Add(`<path class="c%d" d="%s"/>`, i+1, area(samples, below, i, at))
	}
	if capacity > 0 {
		y := at(float64(capacity))
		p.Add(`<path class="cap" d="M%s %sh%s"/>`, svg.Px(plotLeft), svg.Px(y), svg.Px(plotWidth))
		p.Add(`<text x="%s" y="%s" class="capword end">a device has %s</text>`,
			svg.Px(plotLeft+plotWidth-6), svg.Px(y-5), human.GiB(capacity))
	}
	p.timeAxis(schedule.Span{Start: 0, End: t.ticks}, memoryHeight+8)
	p.Add("</svg></figure>\n")
	p.peaks(t, top)
}

// buckets splits the step into equal intervals and keeps the peak of each. An interval without a
// change continues with the last state.
func buckets(samples []Sample, end int64) []program.Memory {
	list := make([]program.Memory, memoryBuckets)
	next := 0
	var now program.Memory
	for i := range list {
		until := end / memoryBuckets * int64(i+1)
		if i == memoryBuckets-1 {
			until = end
		}
		list[i] = now
		for ; next < len(samples) && samples[next].At < until; next++ {
			now = samples[next].Memory
			if now.Sum() > list[i].Sum() {
				list[i] = now
			}
		}
	}
	return list
}

// area is the outline of one cause on top of those below it, which it is then added to.
func area(samples []program.Memory, below []float64, cause int,
	at func(float64) float64) string {
	var up, down []string
	width := plotWidth / float64(len(samples))
	for i, m := range samples {
		bottom := below[i]
		below[i] += float64(shown(m)[cause].Bytes)
		from, to := svg.Px(plotLeft+float64(i)*width), svg.Px(plotLeft+float64(i+1)*width)
		y, low := svg.Px(at(below[i])), svg.Px(at(bottom))
		up = append(up, from+" "+y, to+" "+y)
		down = append(down, from+" "+low, to+" "+low)
	}
	var b strings.Builder
	b.WriteString("M" + strings.Join(up, "L"))
	for _, point := range slices.Backward(down) {
		b.WriteString("L" + point)
	}
	b.WriteString("z")
	return b.String()
}

// peaks writes a bar for each rank.
func (p page) peaks(t *Timeline, top float64) {
	if len(t.Ranks) < 2 {
		return
	}
	p.Add(`<div class="rows bars">`)
	every := (len(t.Ranks) + maxRows - 1) / maxRows
	for rank := 0; rank < len(t.Ranks); rank += every {
		m := t.Ranks[rank].Peak
		p.Add(`<div>rank %d</div><div class="n">%s</div><div class="track">`, rank, human.GiB(m.Sum()))
		from := 0.0
		for i, c := range shown(m) {
			width := 100 * float64(c.Bytes) / top
			p.Add(`<i class="c%d" style="left:%.2f%%;width:%.2f%%"></i>`, i+1, from, width)
			from += width
		}
		p.Add("</div>")
	}
	p.Add("</div>\n")
}
