package dryrun

import (
	"bytes"
	"fmt"
	"math"
	"strconv"

	"github.com/deepwell/deepwell/schedule"
)

// The measures of the pictures, in the units of their view boxes.
const (
	plotLeft   = 70.0
	plotWidth  = 960.0
	plotRight  = 50.0
	rowHeight  = 18.0
	rowGap     = 3.0
	axisHeight = 26.0

	maxRows   = 32  // ranks that are drawn; of more, every n-th
	maxBoxes  = 280 // actions of a row of the whole step; beyond, its start and its end are drawn
	numberFit = 7.0 // width of a digit
)

// classes are the colours of kinds, in the order of the constants.
var classes = [4]string{"f", "b", "i", "w"}

// pipeline draws when each rank does what: the whole step, or its start and its end, where more
// would not be seen. What lies between repeats what is there.
func (p *page) pipeline(t *Timeline) {
	longest := 0
	for _, list := range t.Schedule.Lists {
		longest = max(longest, len(list))
	}
	s := t.Schedule
	text := fmt.Sprintf("%s: %d ranks, %d microbatches", s.Name, s.Ranks, s.Micros)
	if s.Virtual > 1 {
		text += fmt.Sprintf(", %d virtual stages on a rank, later ones paler", s.Virtual)
	}
	if s.Ranks > maxRows {
		text += fmt.Sprintf("; one rank in %d is shown", (s.Ranks+maxRows-1)/maxRows)
	}
	p.head("The pipeline", text+".")
	p.add(`<div class="key">`)
	for kind, class := range classes {
		if hasKind(s, schedule.Kind(kind)) {
			p.add(`<span><i style="background:var(--%s)"></i>%s</span>`, class, words[kind])
		}
	}
	if t.tails[0].end() > t.tails[0].computed {
		p.add(`<span><i class="c2"></i>gradients, optimizer and host at the end</span>`)
	}
	p.add(`<span><i style="background:var(--track)"></i>idle</span></div>`)
	whole := schedule.Span{Start: 0, End: t.ticks}
	if longest <= maxBoxes {
		p.window(t, whole, "the whole step")
		return
	}
	n := t.opening(longest)
	p.window(t, schedule.Span{Start: 0, End: n}, "start of the step")
	p.window(t, schedule.Span{Start: t.ticks - n, End: t.ticks}, "end of the step")
}

func hasKind(s *schedule.Schedule, k schedule.Kind) bool {
	for _, a := range s.Lists[0] {
		if a.Kind == k {
			return true
		}
	}
	return false
}

// opening is how much of the step shows how it begins: until every rank has run for a while.
func (t *Timeline) opening(longest int) int64 {
	first := int64(0)
	for _, spans := range t.Spans {
		if len(spans) > 0 {
			first = max(first, spans[0].Start)
		}
	}
	return min(t.ticks/2, first*2+t.ticks/int64(longest)*maxBoxes/4)
}

// window draws what lies between two moments.
func (p *page) window(t *Timeline, w schedule.Span, name string) {
	every := (len(t.Spans) + maxRows - 1) / maxRows
	rows := (len(t.Spans) + every - 1) / every
	height := float64(rows)*(rowHeight+rowGap) + axisHeight
	p.add(`<figure><svg viewBox="0 0 %s %s" role="img" aria-label="pipeline, %s">`,
		px(plotLeft+plotWidth+plotRight), px(height), name)
	boxes := map[string]*bytes.Buffer{}
	var order []string
	var numbers, names bytes.Buffer
	for row := range rows {
		rank := row * every
		y := float64(row) * (rowHeight + rowGap)
		fmt.Fprintf(&names, `<text x="%s" y="%s" class="end">rank %d</text>`, px(plotLeft-8),
			px(y+13), rank)
		fmt.Fprintf(&names, `<rect x="%s" y="%s" width="%s" height="%s" class="t"/>`,
			px(plotLeft), px(y), px(plotWidth), px(rowHeight))
		for place, a := range t.Schedule.Lists[rank] {
			x, width, ok := clip(t.Spans[rank][place], w)
			if !ok {
				continue
			}
			class := classes[a.Kind]
			if turn := a.Stage / t.Schedule.Ranks; turn > 0 {
				class += fmt.Sprintf(" v%d", 1+(turn-1)%3)
			}
			b := boxes[class]
			if b == nil {
				b = &bytes.Buffer{}
				boxes[class], order = b, append(order, class)
			}
			fmt.Fprintf(b, "M%s %sh%sv%sh-%[3]sz", px(x), px(y), px(max(0.3, width-0.6)), px(rowHeight))
			if n := strconv.Itoa(a.Micro); numberFit*float64(len(n))+3 < width {
				fmt.Fprintf(&numbers, `<text x="%s" y="%s" class="num">%s</text>`,
					px(x+width/2), px(y+13), n)
			}
		}
		for _, x := range t.tails[rank].spans() {
			if x, width, ok := clip(x, w); ok {
				fmt.Fprintf(&names, `<rect x="%s" y="%s" width="%s" height="%s" class="c2"/>`,
					px(x), px(y), px(max(0.3, width-0.6)), px(rowHeight))
			}
		}
		if w.Start == 0 {
			fmt.Fprintf(&names, `<text x="%s" y="%s">%.0f %%</text>`, px(plotLeft+plotWidth+6), px(y+13),
				100*t.Ranks[rank].Busy/max(t.Step, 1e-12))
		}
	}
	p.Write(names.Bytes())
	for _, class := range order {
		p.add(`<path class="%s" d="%s"/>`, class, boxes[class])
	}
	p.Write(numbers.Bytes())
	p.timeAxis(w, height-axisHeight)
	p.add("</svg></figure>\n")
}

// clip gives the part of a span that lies in a window, as place and width in the picture.
func clip(s, w schedule.Span) (x, width float64, ok bool) {
	from, to := max(s.Start, w.Start), min(s.End, w.End)
	if from >= to {
		return 0, 0, false
	}
	scale := plotWidth / float64(w.End-w.Start)
	return plotLeft + float64(from-w.Start)*scale, float64(to-from) * scale, true
}

// timeAxis writes moments in steps of 1, 2 or 5 times a power of ten, at most nine of them.
func (p *page) timeAxis(w schedule.Span, y float64) {
	length := seconds(w.End - w.Start)
	if length <= 0 {
		return
	}
	step := niceStep(length / 9)
	for i := math.Ceil(seconds(w.Start) / step); i*step <= seconds(w.End); i++ {
		x := plotLeft + (i*step-seconds(w.Start))/length*plotWidth
		p.add(`<text x="%s" y="%s" class="mid">%s</text>`, px(x), px(y+17), span(i*step))
	}
}

// niceStep is the least of 1, 2 and 5 times a power of ten that is not less than x.
func niceStep(x float64) float64 {
	base := math.Pow(10, math.Floor(math.Log10(x)))
	for _, m := range []float64{1, 2, 5} {
		if m*base >= x {
			return m * base
		}
	}
	return 10 * base
}

// px writes a length with at most one decimal, which keeps a page of ten thousand boxes small.
func px(x float64) string { return strconv.FormatFloat(math.Round(x*10)/10, 'f', -1, 64) }
