package dryrun

import (
	"bytes"
	"fmt"
	"math"
	"strconv"

	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/svg"
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
	headHeight = 46.0 // of a picture by itself

	pictureWidth = plotLeft + plotWidth + plotRight

	maxRows   = 32  // ranks that are drawn; of more, every n-th
	maxBoxes  = 280 // actions of a row of the whole step; beyond, its start and its end are drawn
	numberFit = 7.0 // width of a digit
)

// classes are the colours of kinds, in the order of the constants.
var classes = [4]string{"f", "b", "i", "w"}

// pipeline draws when each rank does what: the whole step, or its start and its end, where more
// would not be seen. What lies between repeats what is there.
func (p page) pipeline(t *Timeline) {
	longest := lists.Max(t.Schedule.Lists, 0, func(l []schedule.Action) int { return len(l) })
	p.Head("The pipeline", t.title()+".")
	p.Add(`<div class="key">`)
	for kind, class := range classes {
		if t.Schedule.Has(schedule.Kind(kind)) {
			p.Add(`<span><i style="background:var(--%s)"></i>%s</span>`, class, kindNames[kind])
		}
	}
	if t.tails[0].end() > t.tails[0].computed {
		p.Add(`<span><i class="c2"></i>gradients, optimizer and host at the end</span>`)
	}
	p.Add(`<span><i style="background:var(--track)"></i>idle</span></div>`)
	whole := schedule.Span{Start: 0, End: t.ticks}
	if longest <= maxBoxes {
		p.window(t, whole, "the whole step")
		return
	}
	n := t.opening(longest)
	p.window(t, schedule.Span{Start: 0, End: n}, "start of the step")
	p.window(t, schedule.Span{Start: t.ticks - n, End: t.ticks}, "end of the step")
}

// title says what is drawn.
func (t *Timeline) title() string {
	s := t.Schedule
	text := fmt.Sprintf("%s: %d ranks, %d microbatches", s.Name, s.Ranks, s.Micros)
	if s.Virtual > 1 {
		text += fmt.Sprintf(", %d virtual stages on a rank, later ones paler", s.Virtual)
	}
	if s.Ranks > maxRows {
		text += fmt.Sprintf("; one rank in %d is shown", (s.Ranks+maxRows-1)/maxRows)
	}
	return text
}

// SVG draws the whole step as a picture that needs no page around it.
func (t *Timeline) SVG() []byte {
	p := page{&svg.Page{}}
	title, body := svg.Text(t.title()), page{&svg.Page{}}
	height := body.rows(t, schedule.Span{Start: 0, End: t.ticks}) + headHeight
	p.Add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %s %s" role="img" `+
		`aria-labelledby="title"><title id="title">%s</title><style>%s</style>`+
		`<rect width="100%%" height="100%%" style="fill:var(--paper)"/><text x="%s" y="16">%[3]s</text>`,
		svg.Px(pictureWidth), svg.Px(height), title, reportStyle, svg.Px(plotLeft))
	x := plotLeft
	for kind, class := range classes {
		if t.Schedule.Has(schedule.Kind(kind)) {
			p.Add(`<rect x="%s" y="24" width="13" height="13" class="%s"/><text x="%s" y="35">%s</text>`,
				svg.Px(x), class, svg.Px(x+19), kindNames[kind])
			x += 19 + numberFit*float64(len(kindNames[kind])) + 16
		}
	}
	p.Add(`<g transform="translate(0 %s)">%s</g></svg>`+"\n", svg.Px(headHeight), body)
	return p.Bytes()
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
func (p page) window(t *Timeline, w schedule.Span, name string) {
	body := page{&svg.Page{}}
	height := body.rows(t, w)
	p.Add(`<figure><svg viewBox="0 0 %s %s" role="img" aria-label="pipeline, %s">%s</svg></figure>`+
		"\n", svg.Px(pictureWidth), svg.Px(height), name, body)
}

// rows draws a row for each rank, and the time below; it gives their height.
func (p page) rows(t *Timeline, w schedule.Span) (height float64) {
	every := (len(t.Spans) + maxRows - 1) / maxRows
	rows := (len(t.Spans) + every - 1) / every
	height = float64(rows)*(rowHeight+rowGap) + axisHeight
	boxes := map[string]*bytes.Buffer{}
	var order []string
	var numbers, names bytes.Buffer
	for row := range rows {
		rank := row * every
		y := float64(row) * (rowHeight + rowGap)
		fmt.Fprintf(&names, `<text x="%s" y="%s" class="end">rank %d</text>`, svg.Px(plotLeft-8),
			svg.Px(y+13), rank)
		fmt.Fprintf(&names, `<rect x="%s" y="%s" width="%s" height="%s" class="t"/>`,
			svg.Px(plotLeft), svg.Px(y), svg.Px(plotWidth), svg.Px(rowHeight))
		for place, a := range t.Schedule.Lists[rank] {
			at := t.Spans[rank][place]
			x, width, ok := clip(at, w)
			if !ok {
				continue
			}
			class := classes[a.Kind]
			if turn := a.Stage / t.Schedule.Ranks; turn > 0 {
				class += fmt.Sprintf(" v%d", 1+(turn-1)%3)
			}
			box := fmt.Sprintf("M%s %sh%sv%sh-%[3]sz", svg.Px(x), svg.Px(y),
				svg.Px(max(0.3, width-0.6)), svg.Px(rowHeight))
			if n := strconv.Itoa(a.Microbatch); numberFit*float64(len(n))+3 < width {
				fmt.Fprintf(&numbers, `<path class="%s" d="%s"><title>%s, %s to %s</title></path>`+
					`<text x="%s" y="%s" class="num">%s</text>`, class, box, a,
					human.Seconds(seconds(at.Start)), human.Seconds(seconds(at.End)),
					svg.Px(x+width/2), svg.Px(y+13), n)
				continue
			}
			b := boxes[class] // too thin to point at: one path for all
			if b == nil {
				b = &bytes.Buffer{}
				boxes[class], order = b, append(order, class)
			}
			b.WriteString(box)
		}
		for _, x := range t.tails[rank].spans() {
			if x, width, ok := clip(x, w); ok {
				fmt.Fprintf(&names, `<rect x="%s" y="%s" width="%s" height="%s" class="c2"/>`,
					svg.Px(x), svg.Px(y), svg.Px(max(0.3, width-0.6)), svg.Px(rowHeight))
			}
		}
		if w.Start == 0 {
			fmt.Fprintf(&names, `<text x="%s" y="%s">%.0f %%</text>`, svg.Px(plotLeft+plotWidth+6),
				svg.Px(y+13), 100*t.Ranks[rank].Busy/max(t.Step, 1e-12))
		}
	}
	p.Write(names.Bytes())
	for _, class := range order {
		p.Add(`<path class="%s" d="%s"/>`, class, boxes[class])
	}
	p.Write(numbers.Bytes())
	p.timeAxis(w, height-axisHeight)
	return height
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
func (p page) timeAxis(w schedule.Span, y float64) {
	length := seconds(w.End - w.Start)
	if length <= 0 {
		return
	}
	step := svg.Step(length / 9)
	for i := math.Ceil(seconds(w.Start) / step); i*step <= seconds(w.End); i++ {
		x := plotLeft + (i*step-seconds(w.Start))/length*plotWidth
		p.Add(`<text x="%s" y="%s" class="mid">%s</text>`, svg.Px(x), svg.Px(y+17), human.Seconds(i*step))
	}
}
