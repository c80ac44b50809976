package deepwell

import (
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
)

func TestParseBatch(t *testing.T) {
	for text, want := range map[string][2]int64{"": {0, 0}, "512": {512, 0}, "4Mtok": {512, 0}, "16Ktok": {2, 0},
		"1Gtok": {131072, 0}, "8192tok": {1, 0}, "0.5Mtok": {64, 0}, "max=16Mtok": {0, 2048}, "max=100": {0, 100}, "max=1Mtok": {0, 128}} {
		rows, most, err := parseBatch(text, 8192)
		if err != nil || rows != want[0] || most != want[1] {
			t.Errorf("%q is %d rows, %d at most, %v", text, rows, most, err)
		}
	}
	for _, text := range []string{"4M", "0", "-1", "x", "100tok", "max=", "max=1tok", "1.5", "NaN", "Inf", "1e300Gtok"} {
		if _, _, err := parseBatch(text, 8192); diag.From(err) == nil || diag.From(err).Code != diag.BadUsage {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestParseTokens(t *testing.T) {
	for text, want := range map[string]float64{"": 0, "1T": 1e12, "15.6t": 15.6e12, "300B": 300e9, "12": 12, "5M": 5e6} {
		if n, err := parseTokens(text); err != nil || n != want {
			t.Errorf("%q is %v, %v", text, n, err)
		}
	}
	for _, text := range []string{"T", "0", "-1B", "1e40", "many"} {
		if _, err := parseTokens(text); diag.From(err) == nil {
			t.Errorf("%q passes", text)
		}
	}
}

func TestParseWhatIf(t *testing.T) {
	w, err := parseWhatIf("slow=1.2@3,links=2,jitter=0.05,seed=7")
	if err != nil || w.Slow != 1.2 || w.Straggler != 3 || w.Links != 2 || w.Jitter != 0.05 || w.Random == nil {
		t.Errorf("%+v, %v", w, err)
	}
	for _, text := range []string{"rain", "slow", "slow=x", "slow=1@y", "links=", "seed=-1"} {
		if _, err := parseWhatIf(text); diag.From(err) == nil {
			t.Errorf("%q passes", text)
		}
	}
}

// The waterfall ends at the simulated step.
func TestSettle(t *testing.T) {
	parts := settle([]dryrun.Part{{Name: "attention", Seconds: 2}, {Name: "bubble", Seconds: 1}}, 3.5)
	if parts[1].Seconds != 1.5 {
		t.Errorf("%v", parts)
	}
}

func FuzzPlanWords(f *testing.F) {
	for _, text := range []string{"4Mtok", "max=16Mtok", "1T", "slow=1.2@3,links=2", "devices=512,tp=8"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if rows, most, err := parseBatch(text, 4096); err == nil && (rows < 0 || most < 0) {
			t.Fatalf("%q is %d rows, %d at most", text, rows, most)
		}
		if n, err := parseTokens(text); err == nil && !(n >= 0) {
			t.Fatalf("%q is %v tokens", text, n)
		}
		_, _ = parseWhatIf(text)
		if _, n, err := cutDevices(text); err == nil && n < 0 {
			t.Fatalf("%q is %d devices", text, n)
		}
	})
}
