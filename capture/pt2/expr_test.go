package pt2

import (
	"math/big"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestExpressions(t *testing.T) {
	symbols := map[string]int64{"s72": 4, "s27": 10, "u0": 3}
	const s72, s27 = "Symbol('s72', positive=True, integer=True)", "Symbol('s27', integer=True)"
	for text, want := range map[string]struct {
		text string
		v    int64
	}{
		"Integer(-7)":                   {"-7", -7},
		s72:                             {"s72", 4},
		"Symbol('u0')":                  {"u0", 3},
		"Mul(Integer(64), " + s72 + ")": {"64*s72", 256},
		"Add(" + s27 + ", Integer(-1))": {"(s27 + -1)", 9},
		"Min(Integer(8), " + s27 + ")":  {"min(8, s27)", 8},
		"Max(" + s72 + "," + s27 + ", Integer(2))":              {"max(s72, s27, 2)", 10},
		"FloorDiv(" + s27 + ", " + s72 + ")":                    {"FloorDiv(s27, s72)", 2},
		"CeilDiv(" + s27 + ", " + s72 + ")":                     {"CeilDiv(s27, s72)", 3},
		"Mod(Integer(-1), " + s72 + ")":                         {"Mod(-1, s72)", 3},
		"Pow(" + s72 + ", Integer(3))":                          {"Pow(s72, 3)", 64},
		"Equality(" + s72 + ", Integer(4))":                     {"Equality(s72, 4)", 1},
		"And(true, StrictLessThan(" + s27 + ", " + s72 + "))":   {"And(true, StrictLessThan(s27, s72))", 0},
		"Where(Not(false), Integer(1), Integer(2))":             {"Where(Not(false), 1, 2)", 1},
		"ModularIndexing(" + s27 + ", Integer(2), Integer(3))":  {"ModularIndexing(s27, 2, 3)", 2},
		"RShift(LShift(Integer(-1), Integer(62)), Integer(70))": {"RShift(LShift(-1, 62), 70)", -1},
		"Pow(Integer(-1), Integer(9223372036854775807))":        {"Pow(-1, 9223372036854775807)", -1},
		"Integer(9223372036854775807)":                          {"9223372036854775807", 1<<63 - 1},
	} {
		e, err := parseExpr(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if v, err := e.Eval(symbols); err != nil || v != want.v || e.String() != want.text {
			t.Errorf("%s is %s = %d, %v", text, e, v, err)
		}
	}
	e, err := parseExpr("Add(" + s72 + ", Mul(" + s27 + ", " + s72 + "))")
	if err != nil || strings.Join(e.Symbols(), " ") != "s27 s72" {
		t.Errorf("%q %v", e.Symbols(), err)
	}
	if n, ok := integer(3).Const(); n != 3 || !ok {
		t.Error(n, ok)
	}
}

func TestExpressionsWithoutAnInteger(t *testing.T) {
	for text, want := range map[string]string{
		"Symbol('s1')":                                  "has no value",
		"ToFloat(Integer(1))":                           "ToFloat gives no integer",
		"Float('0.5', precision=53)":                    "Float gives no integer",
		"Rational(1, 2)":                                "Rational gives no integer",
		"int_oo":                                        "int_oo gives no integer",
		"FloorDiv(Integer(1), Integer(0))":              "not defined",
		"Mod(Integer(1), Integer(0))":                   "not defined",
		"Pow(Integer(2), Integer(-1))":                  "not defined",
		"Pow(Integer(2), Integer(9223372036854775807))": "overflows",
		"Mul(Integer(4294967296), Integer(4294967296))": "overflows",
		"Add(Integer(9223372036854775807), Integer(1))": "overflows",
		"FloorDiv(Integer(1))":                          "1 arguments",
		"Add()":                                         "0 arguments",
	} {
		e, err := parseExpr(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if _, err = e.Eval(nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	deep := strings.Repeat("Not(", 10_000) + "true" + strings.Repeat(")", 10_000)
	for text, want := range map[string]string{
		"": "expression wanted", "Integer(": "integer of 64 bits", "Integer(9223372036854775808)": "64 bits",
		"Integer(1.5)": "64 bits", "Symbol(s72)": "in quotes", "Symbol('s72": "no end", "Symbol('')": "not the name",
		"Symbol('s\\'72')": "not the name", "Symbol('s72', 3)": "assumption", "Add(Integer(1),)": "wanted",
		"Add(Integer(1) Integer(2))": "',' or ')'", "true)": "follows", "__import__('os')": "wanted", deep: "deeper",
		"12345678901234567890": "64 bits",
	} {
		if e, err := parseExpr(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v %v", text, e, err)
		}
	}
}

// Checked arithmetic agrees with big integers wherever the result fits, and refuses elsewhere.
func TestArithmeticIsChecked(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.OneOf(rapid.Int64(), rapid.Int64Range(-9, 9), rapid.SampledFrom([]int64{-1 << 63, 1<<63 - 1}))
		a, b := number.Draw(t, "a"), number.Draw(t, "b")
		x, y := big.NewInt(a), big.NewInt(b)
		check := func(op string, want *big.Int) {
			got, err := Expr{Op: op, Args: []Expr{integer(a), integer(b)}}.Eval(nil)
			if fits := want != nil && want.IsInt64(); fits != (err == nil) || fits && got != want.Int64() {
				t.Fatalf("%s(%d, %d) is %d, %v; want %v", op, a, b, got, err, want)
			}
		}
		check("Add", new(big.Int).Add(x, y))
		check("Mul", new(big.Int).Mul(x, y))
		if b == 0 {
			check("FloorDiv", nil)
			check("Mod", nil)
			return
		}
		floor, rest := new(big.Int).QuoRem(x, y, new(big.Int))
		if rest.Sign()*y.Sign() < 0 {
			floor.Sub(floor, big.NewInt(1))
			rest.Add(rest, y)
		}
		check("FloorDiv", floor)
		check("Mod", rest)
		if rest.Sign() != 0 {
			floor = new(big.Int).Add(floor, big.NewInt(1))
		}
		check("CeilDiv", floor)
	})
}
