package svg

import (
	_ "embed" // for the style of pages with plots
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Style is the style sheet of a page of tables and plots, light and dark.
//
//go:embed page.css
var Style string

// A Series is a curve of a plot. Points whose Y is not finite are left out.
type Series struct {
	Name  string
	Color int       // of Colors
	X, Y  []float64 // X ascends
	Dots  bool      // points with a mark each, for figures that are far apart
	Faint bool      // behind the others, and not in the key
	Bound float64   // a broken line of its own; 0 draws none
}

// A Plot is a picture of curves over a common X axis. It is drawn twice, for wide and for small
// windows: a style sheet shows one.
type Plot struct {
	Label  string // what a screen reader says
	X, Y   string // names of the axes, with units
	Series []Series
	Zero   bool    // the axis of Y has 0, as a line of its own
	Log    bool    // Y is logarithmic; points that are not positive are left out
	Most   float64 // where X ends, if that is after the last point
}

// Colors is how many colors Style has; more curves begin anew.
const Colors = 6

// Plot draws a plot under its key.
func (p *Page) Plot(plot Plot) {
	p.Add(`<div class="key">`)
	for _, s := range plot.Series {
		if s.Name != "" && !s.Faint {
			p.Add(`<span><i style="background:var(--s%d)"></i>%s</span>`, s.Color%Colors, Text(s.Name))
		}
	}
	p.Add(`</div><figure>`)
	for _, f := range []frame{
		{class: "wide", left: 64, top: 10, width: 860, height: 260, marks: 8},
		{class: "small", left: 48, top: 10, width: 290, height: 190, marks: 3},
	} {
		f.Plot, f.page = plot, p
		f.fit()
		f.draw()
	}
	p.Add("</figure>\n")
}

// A frame is a plot at one size, in its own units.
type frame struct {
	Plot
	page                     *Page
	class                    string
	left, top, width, height float64
	marks                    float64 // on the axis of X, about
	low, high, first, last   float64 // ends of the axes; low and high as scale gives them
}

// scale gives a value's place on the axis of Y, before it is stretched to the frame.
func (f *frame) scale(v float64) float64 {
	if f.Log {
		return math.Log10(v)
	}
	return v
}

// shown reports whether a value can be drawn.
func (f *frame) shown(v float64) bool {
	return !math.IsNaN(v) && !math.IsInf(v, 0) && (!f.Log || v > 0)
}

// fit finds the ends of both axes.
func (f *frame) fit() {
	f.low, f.high, f.first, f.last = math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	see := func(v float64) {
		if f.shown(v) {
			f.low, f.high = min(f.low, f.scale(v)), max(f.high, f.scale(v))
		}
	}
	for _, s := range f.Series {
		for i, v := range s.Y {
			see(v)
			f.first, f.last = min(f.first, s.X[i]), max(f.last, s.X[i])
		}
		if s.Bound > 0 {
			see(s.Bound)
		}
	}
	if f.Zero {
		see(0)
	}
	if f.high < f.low { // nothing is drawn
		f.low, f.high = 0, 1
	}
	if f.first > f.last {
		f.first, f.last = 0, 1
	}
	f.first, f.last = min(f.first, 0), max(f.last, f.Most, f.first+1)
	pad := max((f.high-f.low)*0.05, 1e-9, 1e-6*math.Abs(f.high))
	f.low, f.high = f.low-pad, f.high+pad
}

func (f *frame) x(v float64) string {
	return Px(f.left + f.width*(v-f.first)/(f.last-f.first))
}

func (f *frame) y(v float64) float64 {
	return f.top + f.height*(f.high-f.scale(v))/(f.high-f.low)
}

func (f *frame) draw() {
	f.page.Add(`<svg class="%s" viewBox="0 0 %s %s" role="img" aria-label="%s">`, f.class,
		Px(f.left+f.width+16), Px(f.top+f.height+40), Text(f.Label))
	f.rows()
	every := max(1, Step((f.last-f.first)/f.marks))
	for v := math.Ceil(f.first/every) * every; v <= f.last; v += every {
		f.page.Add(`<text class="mid" x="%s" y="%s">%s</text>`, f.x(v), Px(f.top+f.height+18),
			short(v))
	}
	f.page.Add(`<text class="mid" x="%s" y="%s">%s</text>`, Px(f.left+f.width/2),
		Px(f.top+f.height+36), Text(strings.Join(slices.DeleteFunc([]string{f.Y, "by " + f.X},
			func(s string) bool { return s == "" || s == "by " }), " ")))
	for _, s := range f.Series {
		if s.Bound > 0 {
			f.page.Add(`<path class="bound" style="stroke:var(--s%d)" d="M%s %sh%s"/>`, s.Color%Colors,
				Px(f.left), Px(f.y(s.Bound)), Px(f.width))
		}
		if s.Dots {
			f.dots(s)
		} else {
			f.curve(s)
		}
	}
	f.page.Add("</svg>")
}

// rows draws the lines of the grid with the figures of Y.
func (f *frame) rows() {
	for _, m := range f.levels() {
		class := "grid"
		if f.Zero && m == 0 {
			class = "zero"
		}
		y := f.y(m)
		f.page.Add(`<path class="%s" d="M%s %sh%s"/><text class="end" x="%s" y="%s">%s</text>`, class,
			Px(f.left), Px(y), Px(f.width), Px(f.left-8), Px(y+4), f.level(m))
	}
}

// levels are the values of Y that have a line.
func (f *frame) levels() (list []float64) {
	if f.Log {
		digits := []float64{1, 2, 5}
		if f.high-f.low > 3 {
			digits = digits[:1]
		}
		for e := math.Floor(f.low); e <= f.high; e++ {
			for _, d := range digits {
				if v := d * math.Pow(10, e); f.scale(v) >= f.low && f.scale(v) <= f.high {
					list = append(list, v)
				}
			}
		}
		return list
	}
	step := Step((f.high - f.low) / 5)
	for i := math.Ceil(f.low / step); i*step <= f.high; i++ {
		list = append(list, i*step)
	}
	return list
}

// level writes a value of Y with as many digits as the lines are apart.
func (f *frame) level(v float64) string {
	if v == 0 {
		return "0" // and not −0
	}
	if f.Log || math.Abs(v) >= 1e4 || math.Abs(v) < 1e-3 {
		return short(v)
	}
	step := Step((f.high - f.low) / 5)
	digits := max(0, int(math.Ceil(-math.Log10(step)-1e-9)))
	return strings.Replace(strconv.FormatFloat(v, 'f', digits, 64), "-", "−", 1)
}

// short writes a figure of an axis: 500, 20k, 1.5M, 1e-5.
func short(v float64) string {
	text := strconv.FormatFloat(v, 'g', 4, 64)
	v, _ = strconv.ParseFloat(text, 64) // sums of steps have noise in their last digits
	a := math.Abs(v)
	switch {
	case a >= 1e12 || a > 0 && a < 1e-3:
		text = strings.Replace(strconv.FormatFloat(v, 'e', -1, 64), "e-0", "e-", 1)
	case a >= 1e9:
		text = strconv.FormatFloat(v/1e9, 'g', 4, 64) + "B"
	case a >= 1e6:
		text = strconv.FormatFloat(v/1e6, 'g', 4, 64) + "M"
	case a >= 1e4:
		text = strconv.FormatFloat(v/1e3, 'g', 4, 64) + "k"
	}
	return strings.Replace(text, "-", "−", 1)
}

// curve draws a line. Where it has more points than the frame has units, each two units show the
// lowest and the highest value between them, so that no spike is lost.
func (f *frame) curve(s Series) {
	class := "curve"
	if s.Faint {
		class = "curve faint"
	}
	f.page.Add(`<path class="%s" style="stroke:var(--s%d)" d="`, class, s.Color%Colors)
	word := "M"
	for _, i := range f.thinned(s) {
		if i < 0 {
			word = "M"
			continue
		}
		f.page.Add("%s%s %s", word, f.x(s.X[i]), Px(f.y(s.Y[i])))
		word = "L"
	}
	f.page.Add(`"/>`)
}

// thinned gives the points of a curve that are drawn, and −1 where it is broken.
func (f *frame) thinned(s Series) (list []int) {
	every := max(1, (len(s.Y)*4+int(f.width)-1)/int(f.width))
	for from := 0; from < len(s.Y); from += every {
		lowest, highest := -1, -1
		for i := from; i < min(from+every, len(s.Y)); i++ {
			if !f.shown(s.Y[i]) {
				continue
			}
			if lowest < 0 || s.Y[i] < s.Y[lowest] {
				lowest = i
			}
			if highest < 0 || s.Y[i] > s.Y[highest] {
				highest = i
			}
		}
		if lowest < 0 {
			list = append(list, -1)
			continue
		}
		list = append(list, min(lowest, highest))
		if lowest != highest {
			list = append(list, max(lowest, highest))
		}
	}
	return list
}

// dots draws marks, each of which says what it is when one points at it.
func (f *frame) dots(s Series) {
	for i, v := range s.Y {
		if f.shown(v) {
			f.page.Add(`<circle cx="%s" cy="%s" r="3.5" style="fill:var(--s%d)"><title>%s</title></circle>`,
				f.x(s.X[i]), Px(f.y(v)), s.Color%Colors,
				Text(fmt.Sprintf("%s: %.4g at %s %s", s.Name, v, f.X, short(s.X[i]))))
		}
	}
}
