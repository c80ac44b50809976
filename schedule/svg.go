package schedule

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strconv"
)

// The measures of a drawing, in pixels.
const (
	boxWidth  = 22.0   // of the shortest action, so that three digits fit
	plotMost  = 8000.0 // of all actions: browsers and printers slow down beyond
	plotLeast = 560.0  // so that title and legend fit
	rowHeight = 26.0
	rowGap    = 4.0
	left      = 64.0 // for the names of ranks
	right     = 70.0 // for their idle shares
	top       = 62.0 // for title and legend
	bottom    = 34.0 // for the axis
	digit     = 7.0  // one digit of a number in a box
)

// looks gives each kind its colour and its word, in the order of the constants. The colours differ
// in hue and in lightness, also for most people who do not tell red from green, and are
// light enough for dark letters, so that boxes look the same on white and on black.
var looks = [len(letters)]struct {
	red, green, blue float64
	word             string
}{
	{0x7c, 0xc0, 0xf0, "forward"},
	{0xf2, 0xa1, 0x6b, "backward"},
	{0xf2, 0xc1, 0x4e, "input gradient"},
	{0x6f, 0xcf, 0xaa, "weight gradient"},
}

// style is all that depends on the background.
const style = `<style>
text{font:12px system-ui,sans-serif}
.ink{fill:#1f2328}.soft{fill:#59636e}.paper{fill:#ffffff}.track{fill:#e6eaef}
@media(prefers-color-scheme:dark){
.ink{fill:#e6edf3}.soft{fill:#9198a1}.paper{fill:#0d1117}.track{fill:#2a313c}}
.n{fill:#10161d;text-anchor:middle}.e{text-anchor:end}.m{text-anchor:middle}
.h{font-weight:600;font-size:14px}
</style>
`

// A drawing is a timeline on its way to SVG.
type drawing struct {
	bytes.Buffer
	line  *Timeline
	scale float64 // pixels to a tick
	plot  float64 // width of all ticks
}

// SVG draws the timeline: a row for each rank, a box for each action with the number of its
// microbatch, coloured by kind and paler for later virtual stages. The file needs nothing else, and
// follows a dark background. It is meant to be looked at: above some ten thousand actions it
// becomes large.
func (t *Timeline) SVG() []byte {
	shortest := t.Makespan
	for _, spans := range t.Spans {
		for _, s := range spans {
			if n := s.End - s.Start; n > 0 {
				shortest = min(shortest, n)
			}
		}
	}
	d := &drawing{line: t}
	if t.Makespan > 0 {
		all := float64(t.Makespan)
		d.plot = max(plotLeast, min(plotMost, boxWidth*all/float64(shortest)))
		d.scale = d.plot / all
	} else {
		d.plot = plotLeast
	}
	d.head()
	for rank := range t.Spans {
		d.row(rank)
	}
	d.axis()
	d.WriteString("</svg>\n")
	return d.Bytes()
}

// px writes a length with at most two decimals.
func px(x float64) string {
	return strconv.FormatFloat(math.Round(x*100)/100, 'f', -1, 64)
}

func (d *drawing) rows() float64 { return float64(len(d.line.Spans)) * (rowHeight + rowGap) }

func (d *drawing) text(x, y float64, class, text string) {
	fmt.Fprintf(d, `<text x="%s" y="%s" class="%s">%s</text>`+"\n", px(x), px(y), class, text)
}

// head writes the title, what it says in words for those who do not see it, and the legend.
func (d *drawing) head() {
	s := d.line.Schedule
	var name bytes.Buffer
	_ = xml.EscapeText(&name, []byte(s.Name)) // a buffer takes everything
	title := fmt.Sprintf("%s: %d ranks, %d microbatches", name.String(), s.Ranks, s.Micros)
	if s.Virtual > 1 {
		title += fmt.Sprintf(", %d virtual stages on a rank", s.Virtual)
	}
	share := fmt.Sprintf("%d ticks, %.1f %% idle", d.line.Makespan, 100*d.line.Share())
	width, height := left+d.plot+right, top+d.rows()+bottom
	fmt.Fprintf(d, `<svg xmlns="http://www.w3.org/2000/svg" width="%s" height="%s" `+
		`viewBox="0 0 %[1]s %[2]s" role="img" aria-labelledby="title desc">`+"\n", px(width), px(height))
	fmt.Fprintf(d, "<title id=\"title\">%s</title>\n<desc id=\"desc\">A row for each rank, a box for "+
		"each action with its microbatch. %s.</desc>\n", title, share)
	d.WriteString(style)
	fmt.Fprintf(d, `<rect width="%s" height="%s" class="paper"/>`+"\n", px(width), px(height))
	d.text(left, 22, "ink h", title)
	x := left
	for kind, look := range looks {
		if !d.has(Kind(kind)) {
			continue
		}
		fmt.Fprintf(d, `<rect x="%s" y="34" width="14" height="14" rx="2" fill="%s"/>`+"\n",
			px(x), d.colour(Kind(kind), 0))
		d.text(x+20, 45, "soft", look.word)
		x += 20 + digit*float64(len(look.word)) + 16
	}
	d.text(left+d.plot+right-8, 22, "soft e", share)
}

func (d *drawing) has(k Kind) bool {
	for _, list := range d.line.Schedule.Lists {
		for _, a := range list {
			if a.Kind == k {
				return true
			}
		}
	}
	return false
}

// colour is that of the kind, up to two thirds of the way to white for the last virtual stage.
func (d *drawing) colour(k Kind, stage int) string {
	s := d.line.Schedule
	pale := 0.66 * float64(stage/s.Ranks) / float64(max(1, s.Virtual-1))
	mix := func(c float64) int { return int(math.Round(c + (255-c)*pale)) }
	look := looks[k]
	return fmt.Sprintf("#%02x%02x%02x", mix(look.red), mix(look.green), mix(look.blue))
}

// row draws one rank.
func (d *drawing) row(rank int) {
	y := top + float64(rank)*(rowHeight+rowGap)
	mid := y + rowHeight/2 + 4
	d.text(left-8, mid, "ink e", fmt.Sprintf("rank %d", rank))
	fmt.Fprintf(d, `<rect x="%s" y="%s" width="%s" height="%s" class="track"/>`+"\n",
		px(left), px(y), px(d.plot), px(rowHeight))
	for place, a := range d.line.Schedule.Lists[rank] {
		span := d.line.Spans[rank][place]
		x, width := left+float64(span.Start)*d.scale, float64(span.End-span.Start)*d.scale
		fmt.Fprintf(d, `<g><title>%s, %d to %d</title><rect x="%s" y="%s" width="%s" height="%s" `+
			`rx="2" fill="%s"/>`, a, span.Start, span.End, px(x+0.5), px(y), px(max(0.5, width-1)),
			px(rowHeight), d.colour(a.Kind, a.Stage))
		if n := strconv.Itoa(a.Micro); digit*float64(len(n)) < width {
			fmt.Fprintf(d, `<text x="%s" y="%s" class="n">%s</text>`, px(x+width/2), px(mid), n)
		}
		d.WriteString("</g>\n")
	}
	idle := 0.0
	if d.line.Makespan > 0 {
		idle = 100 * float64(d.line.Idle(rank)) / float64(d.line.Makespan)
	}
	d.text(left+d.plot+right-8, mid, "soft e", fmt.Sprintf("%.1f %%", idle))
}

// axis writes ticks in steps of 1, 2 or 5 times a power of ten, at least 40 pixels apart.
func (d *drawing) axis() {
	y := top + d.rows()
	step := int64(1)
	for i := 0; float64(step)*d.scale < 40 && step <= d.line.Makespan; i++ {
		step = []int64{1, 2, 5}[i%3] * int64(math.Pow10(i/3))
	}
	for at := int64(0); at <= d.line.Makespan; at += step {
		x := left + float64(at)*d.scale
		fmt.Fprintf(d, `<rect x="%s" y="%s" width="1" height="5" class="soft"/>`+"\n", px(x), px(y))
		d.text(x, y+19, "soft m", strconv.FormatInt(at, 10))
	}
}
