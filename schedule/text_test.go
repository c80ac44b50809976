package schedule

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
)

// A schedule reads what it prints, as text and as JSON.
func TestTextAndBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draw(t, Shape{12, 4, 48})
		back, err := Parse([]byte(s.String()))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(s, back); diff != "" {
			t.Fatal(diff)
		}
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var read Schedule
		if err := json.Unmarshal(text, &read); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(s, &read); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestJSON(t *testing.T) {
	got, err := json.Marshal(mustNew(t, "1f1b", Shape{2, 1, 1}))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"name":"1f1b","layout":"loop","ranks":2,"virtual":1,"micros":1,` +
		`"lists":[["F0.0","B0.0"],["F1.0","B1.0"]]}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var s Schedule
	if err := json.Unmarshal([]byte(`{"lists":[["X0.0"]]}`), &s); err == nil {
		t.Error("X0.0 is read")
	}
}

func TestTextsThatAreNot(t *testing.T) {
	const head = "schedule own: 1 ranks, 1 virtual, 1 microbatches, loop\n"
	for text, says := range map[string]string{
		"":                                    "holds no schedule",
		"# only a comment\n":                  "holds no schedule",
		"schedule\n":                          "no head",
		strings.Replace(head, "own:", ":", 1): "no head",
		strings.Replace(head, "1 ranks", "01 ranks", 1):               "no head",
		strings.Replace(head, "1 ranks", "-1 ranks", 1):               "no head",
		strings.Replace(head, "loop", "spiral", 1):                    "no head",
		strings.Replace(head, "1 ranks", "0 ranks", 1):                "0 ranks",
		strings.Replace(head, "1 microbatches", "60000000 micros", 1): "more than a schedule can hold; at line 1",
		head:                       "0 lists for 1 ranks",
		head + "1: F0.0":           `"1:" is no list`,
		head + "0: F0.0\n0: F0.0":  `"0:" is no list of the next rank; at line 3`,
		head + "0: F0.0\n1: F0.0":  `"1:" is no list`,
		head + "\n# here\n0: G0.1": `"G0.1" is no action; at line 4`,
		head + "0: F":              `"F" is no action`,
		head + "0: F0":             `"F0" is no action`,
		head + "0: F0.":            `"F0." is no action`,
		head + "0: F0.01":          `"F0.01" is no action`,
		head + "0: F+0.1":          `"F+0.1" is no action`,
		head + "0: F0.99999999999": `is no action`,
	} {
		_, err := Parse([]byte(text))
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: got %v, want %q", text, err, says)
			continue
		}
		if e := diag.From(err); e.Code == diag.Internal || e.Fix == "" {
			t.Errorf("%q: %v lacks a code or a fix", text, err)
		}
	}
}

// No text makes Parse, Validate, Simulate or Steps fall over, and what is read prints itself.
func FuzzParse(f *testing.F) {
	for _, name := range Names() {
		s, err := New(name, Shape{2, 0, 2})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(s.String())
		f.Add(strings.Replace(s.String(), name, "own", 1))
	}
	f.Add("schedule own: 1 ranks, 1 virtual, 1 microbatches, vee\n# one\n0: F0.0 I0.0 W0.0\n")
	f.Add("schedule own: 67108864 ranks, 1 virtual, 1 microbatches, loop\n0: F0.0\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse([]byte(text))
		if err != nil {
			if diag.From(err).Code == diag.Internal {
				t.Fatalf("an error without a code: %v", err)
			}
			return
		}
		back, err := Parse([]byte(s.String()))
		if err != nil || back.String() != s.String() {
			t.Fatalf("%q is read as %q (%v)", text, s, err)
		}
		valid := s.Validate() == nil
		if _, err := s.Simulate(Even(1, 2, 3)); valid && err != nil {
			t.Fatalf("a valid schedule does not run: %v", err)
		}
		if steps, err := s.Steps(Even(1, 0, 3), 1); valid && err != nil {
			t.Fatalf("a valid schedule has no steps: %v", err)
		} else if err == nil {
			if _, err := play(s, steps, 1, Even(3, 1, 1)); err != nil {
				t.Fatalf("%s%v", s, err)
			}
		}
	})
}
