package strictjson

import (
	"math"
	"strings"
	"testing"
)

func TestScanner(t *testing.T) {
	s := Scan(` {"i": -9223372036854775808, "f": 1.5E-3, "b": true, "n": null, "s": "a\u00e9", "skip": [{"x": []}], "l": [1, 2]} `)
	var keys strings.Builder
	err := s.Unique(func(key string) (err error) {
		keys.WriteString(key)
		switch key {
		case "i":
			if n, e := s.Int(); n != math.MinInt64 || e != nil {
				t.Error(n, e)
			}
		case "f":
			if f, e := s.Float(); f != 1.5e-3 || e != nil {
				t.Error(f, e)
			}
		case "b":
			if b, e := s.Flag(); !b || e != nil {
				t.Error(b, e)
			}
		case "n":
			if !s.Null() {
				t.Error("no null")
			}
		case "s":
			if text, e := s.Text(); text != "aé" || e != nil {
				t.Error(text, e)
			}
		case "l":
			sum := int64(0)
			err = s.Array(func() error { n, err := s.Integer(); sum += n; return err })
			if sum != 3 {
				t.Error(sum)
			}
		default:
			err = s.Skip()
		}
		return err
	})
	if err != nil || keys.String() != "ifbnsskipl" || s.End("the document") != nil {
		t.Error(keys.String(), err, s.Rest())
	}
}

func TestScannerRefuses(t *testing.T) {
	var many strings.Builder
	for c := range 20 {
		many.WriteString(`"` + string(rune('a'+c)) + `": 1, `)
	}
	each := func(s *Scanner) error { return s.Unique(func(string) error { return s.Skip() }) }
	whole := func(s *Scanner) error { _, err := s.Int(); return err }
	real := func(s *Scanner) error { _, err := s.Float(); return err }
	flag := func(s *Scanner) error { _, err := s.Flag(); return err }
	end := func(s *Scanner) error { return s.End("nothing") }
	for _, row := range []struct {
		text, want string
		read       func(s *Scanner) error
	}{
		{`{"a": 1, "a": 2}`, "twice", each},
		{`{"a": 1, "\u0061": 2}`, "twice", each},
		{`{` + many.String() + `"t": 2}`, "twice", each},
		{`{` + many.String() + `"a": 2}`, "twice", each},
		{strings.Repeat("[", 99), "deeper than 64", func(s *Scanner) error { return s.Skip() }},
		{`1.0`, "integer of 64 bits", whole}, {`1e3`, "integer", whole}, {`9223372036854775808`, "integer", whole},
		{`01`, "number wanted", whole}, {`+1`, "number wanted", whole}, {`"1"`, "number wanted", whole}, {``, "the end", whole},
		{`NaN`, "number wanted", real}, {`1.`, "number wanted", real}, {`.5`, "number wanted", real}, {`1e999`, "out of range", real},
		{`1e`, "number wanted", real}, {`True`, "true or false", flag}, {`1`, "true or false", flag},
		{`x`, "follows", end}, {"\x00", "follows", end},
	} {
		s := Scan(row.text)
		if err := row.read(&s); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%.60q: %v", row.text, err)
		}
	}
}
