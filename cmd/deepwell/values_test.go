package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/diag"
)

func TestParseBatch(t *testing.T) {
	for text, want := range map[string]deepwell.Batch{"": {}, "512": {Sequences: 512}, "4Mtok": {Tokens: 4 << 20},
		"16Ktok": {Tokens: 16 << 10}, "1Gtok": {Tokens: 1 << 30}, "8192tok": {Tokens: 8192}, "0.5Mtok": {Tokens: 1 << 19},
		"max=16Mtok": {Tokens: 16 << 20, AtMost: true}, "max=100": {Sequences: 100, AtMost: true}} {
		if b, err := parseBatch(text); err != nil || b != want {
			t.Errorf("%q is %+v, %v", text, b, err)
		}
	}
	for _, text := range []string{"4M", "0", "-1", "x", "max=", "1.5", "NaN", "Inf", "1e300Gtok"} {
		if _, err := parseBatch(text); !errors.Is(err, diag.BadUsage) {
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

func TestParseSteps(t *testing.T) {
	for text, want := range map[string][2]int{"10:13": {10, 13}, "7": {7, 7}, "1:1": {1, 1}, "": {}} {
		steps, err := parseSteps(text)
		if err != nil || steps != want {
			t.Errorf("%q is %d, %v", text, steps, err)
		}
	}
	for text, want := range map[string]string{"a:b": "10:13", "0:3": "counted from 1", "13:10": "--profile 10:13",
		"1:2:3": "10:13", "5:": "10:13", "-1:4": "counted from 1"} {
		_, err := parseSteps(text)
		if e := diag.From(err); e == nil || e.Code != diag.BadUsage || !strings.Contains(e.Format(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzFlagValues(f *testing.F) {
	for _, text := range []string{"4Mtok", "max=16Mtok", "1T", "slow=1.2@3,links=2", "devices=512,tp=8"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if b, err := parseBatch(text); err == nil && (b.Sequences < 0 || b.Tokens < 0) {
			t.Fatalf("%q is %+v", text, b)
		}
		if n, err := parseTokens(text); err == nil && !(n >= 0) {
			t.Fatalf("%q is %v tokens", text, n)
		}
		_, _ = parseWhatIf(text)
		if s, err := parseSteps(text); err == nil && text != "" && (s[0] < 1 || s[1] < s[0]) {
			t.Fatalf("%q is steps %d", text, s)
		}
		if _, n, err := parseFix(text); err == nil && n < 0 {
			t.Fatalf("%q is %d devices", text, n)
		}
	})
}
