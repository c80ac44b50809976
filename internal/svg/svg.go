// Package svg turns what a report says into one HTML page with SVG pictures, which needs
// nothing from elsewhere and follows a dark background.
package svg

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"strconv"
)

// A Page is HTML on its way.
type Page struct{ bytes.Buffer }

// New begins a page with a title, a style sheet and a sentence under the title.
func New(title, style, line string) *Page {
	p := &Page{}
	p.Add(`<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" `+
		`content="width=device-width"><title>%s</title><style>%s</style><main>`, Text(title), style)
	p.Add("<h1>%s</h1><p>%s</p>", Text(title), Text(line))
	return p
}

// Text is text that HTML shows as it is.
func Text(s string) string { return html.EscapeString(s) }

// Add writes HTML.
func (p *Page) Add(format string, args ...any) { fmt.Fprintf(p, format, args...) }

// Head begins a section.
func (p *Page) Head(title, text string) { p.Add("<h2>%s</h2><p>%s</p>", Text(title), Text(text)) }

// End ends the page.
func (p *Page) End() []byte {
	p.Add("</main></html>\n")
	return p.Bytes()
}

// Step is the least of 1, 2 and 5 times a power of ten that is not less than x: the distance of
// marks on an axis.
func Step(x float64) float64 {
	base := math.Pow(10, math.Floor(math.Log10(x)))
	for _, m := range []float64{1, 2, 5} {
		if m*base >= x {
			return m * base
		}
	}
	return 10 * base
}

// Px writes a length with at most one decimal, which keeps a page of ten thousand boxes small.
func Px(x float64) string { return strconv.FormatFloat(math.Round(x*10)/10, 'f', -1, 64) }
