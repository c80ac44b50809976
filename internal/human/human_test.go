package human

import (
	"math"
	"testing"
)

func TestAmount(t *testing.T) {
	for x, want := range map[float64]string{206_000: "206k", 2.74e6: "2.74M", 1.5e9: "1.5B", 12: "12"} {
		if got := Amount(x); got != want {
			t.Errorf("%v is %s, not %s", x, got, want)
		}
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", -999: "-999", 1000: "1,000",
		-1234567: "-1,234,567", 65536: "65,536"} {
		if got := Thousands(n); got != want {
			t.Errorf("%d is written %s, want %s", n, got, want)
		}
	}
}

func TestSeconds(t *testing.T) {
	for s, want := range map[float64]string{0: "0 s", 2.5e-7: "0.25 µs", 1e-3: "1.00 ms", 0.0123: "12.3 ms",
		0.5: "500 ms", 0.9996: "1.00 s", 12.34: "12.3 s", 1234: "1234 s"} {
		if got := Seconds(s); got != want {
			t.Errorf("%v is written %s, want %s", s, got, want)
		}
	}
}

func TestParameters(t *testing.T) {
	for n, want := range map[int64]string{1_500: "1.5k", 124_400_000: "124M", 8_030_000_000: "8.03B",
		405_850_000_000: "405.9B", 1_026_000_000_000: "1.03T"} {
		if got := Parameters(n, 0); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
	if got := Parameters(124_440_000, 1); got != "124.4M" {
		t.Error(got)
	}
}

func TestSmall(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 1e-5: "1e-5", 4.5e-4: "4.5e-4", 1.2e-12: "1.2e-12",
		2e-2: "2e-2", 0.12: "0.12", 1: "1.0", 12.3: "12", 1e10: "1e10", 2.5e4: "2.5e4",
		math.MaxFloat64: "NaN"} {
		if got := Small(x); got != want {
			t.Errorf("%g is written %q, not %q", x, got, want)
		}
	}
}
