// Package human turns numbers into the text that people read.
package human

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Thousands writes a number with commas: 50,000.
func Thousands(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// Count writes a number with its noun: 1 file, 1,024 files.
func Count[N int | int64](n N, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return Thousands(int64(n)) + " " + noun
}

// Amount writes a number with a letter: 206k, 1.2M.
func Amount(x float64) string {
	letter := ""
	for _, next := range []string{"k", "M", "B", "T"} {
		if x < 1e3 {
			break
		}
		x, letter = x/1e3, next
	}
	return strconv.FormatFloat(x, 'g', 3, 64) + letter
}

// Parameters writes a model's number of parameters: 8.03B, with the given digits of millions.
func Parameters(n int64, digits int) string {
	for _, unit := range []struct {
		below, of float64
		digits    int
		letter    string
	}{{1e6, 1e3, 1, "k"}, {1e9, 1e6, digits, "M"}, {1e11, 1e9, 2, "B"}, {1e12, 1e9, 1, "B"}} {
		if float64(n) < unit.below {
			return strconv.FormatFloat(float64(n)/unit.of, 'f', unit.digits, 64) + unit.letter
		}
	}
	return fmt.Sprintf("%.2fT", float64(n)/1e12)
}

// Seconds writes a time with three digits.
func Seconds(s float64) string {
	switch {
	case s >= 0.9995:
		return digits(s) + " s"
	case s >= 1e-3:
		return digits(1e3*s) + " ms"
	case s > 0:
		return fmt.Sprintf("%.3g µs", 1e6*s)
	}
	return "0 s"
}

// digits writes a number from 1 on with three digits, or all those before the point.
func digits(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

// Percent writes a share: 12.5 %.
func Percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// Signed writes a change as a share: +1.5 %, −1.5 %.
func Signed(share float64) string { return minus(fmt.Sprintf("%+.1f %%", 100*share)) }

// minus gives a number its minus sign in place of the hyphen.
func minus(number string) string { return strings.Replace(number, "-", "−", 1) }

// InGiB is a number of bytes in GiB.
func InGiB(bytes int64) float64 { return float64(bytes) / (1 << 30) }

// GiB writes a number of bytes, in MiB where they are less than a tenth of a GiB.
func GiB(bytes int64) string {
	switch x := InGiB(bytes); {
	case x >= 100:
		return fmt.Sprintf("%.0f GiB", x)
	case x >= 0.1:
		return fmt.Sprintf("%.1f GiB", x)
	default:
		return fmt.Sprintf("%.1f MiB", 1024*x)
	}
}

// Quote makes a name from a file fit for a terminal: control characters escaped, long names
// truncated.
func Quote(name string) string {
	const most = 80 // columns, about a terminal's
	if len(name) <= most {
		return strconv.Quote(name)
	}
	return strconv.Quote(strings.ToValidUTF8(name[:most], "")) + "…"
}

// Small writes a relative difference or its bound with two digits, or one if the second is 0: 1e-5,
// 4.5e-4, 0.12, 1.0. [math.MaxFloat64] and
// infinity stand for NaN.
func Small(x float64) string {
	switch {
	case x == 0:
		return "0"
	case x >= math.MaxFloat64:
		return "NaN"
	case x >= 0.1 && x < 1000:
		return fmt.Sprintf("%.*f", max(0, 1-int(math.Floor(math.Log10(x)))), x)
	}
	text := strings.Replace(fmt.Sprintf("%.1e", x), ".0e", "e", 1)
	return strings.NewReplacer("e-0", "e-", "e+0", "e", "e+", "e").Replace(text)
}
