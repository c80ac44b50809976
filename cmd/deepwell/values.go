package main

import (
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
)

// Values of flags, from text to what the library takes.

// commas splits a list at its commas; empty items are left out.
func commas(text string) (list []string) {
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.TrimSpace(name); name != "" {
			list = append(list, name)
		}
	}
	return list
}

// batchUnits are the units of a batch in tokens: powers of two, as batches are.
var batchUnits = []struct {
	suffix string
	tokens int64
}{{"Gtok", 1 << 30}, {"Mtok", 1 << 20}, {"Ktok", 1 << 10}, {"tok", 1}}

// parseBatch reads the size of a step: 512 (sequences), 4Mtok, max=16Mtok.
func parseBatch(text string) (b deepwell.Batch, err error) {
	if text == "" {
		return b, nil
	}
	number := ""
	number, b.AtMost = strings.CutPrefix(text, "max=")
	unit := int64(0) // sequences
	for _, u := range batchUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = rest, u.tokens
			break
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	whole := unit > 0 || n == float64(int64(n))
	if err != nil || !(n > 0) || n*float64(max(1, unit)) > 1<<60 || !whole {
		return deepwell.Batch{}, diag.New(diag.BadUsage, "%q is not a batch size", text).
			Try("give sequences, tokens as in 4Mtok, or a limit as in max=16Mtok")
	}
	if unit == 0 {
		b.Sequences = int64(n)
	} else {
		b.Tokens = int64(n * float64(unit))
	}
	return b, nil
}

// parseFix reads what a plan must have, such as tp=8,devices=512.
func parseFix(text string) (fixed autoplan.Fixed, devices int, err error) {
	var others []string
	for item := range strings.SplitSeq(text, ",") {
		value, ok := strings.CutPrefix(strings.TrimSpace(item), "devices=")
		if !ok {
			others = append(others, item)
			continue
		}
		if devices, err = strconv.Atoi(value); err != nil || devices < 1 {
			return nil, 0, diag.New(diag.BadUsage, "%q is not a number of devices", value).
				Try("--fix devices=512")
		}
	}
	fixed, err = autoplan.ParseFixed(strings.Join(others, ","))
	return fixed, devices, err
}

// parseFrom reads STACK=FILE.
func parseFrom(text string) (stack, file string, err error) {
	stack, file, _ = strings.Cut(text, "=")
	if text != "" && (stack == "" || file == "") {
		return "", "", diag.New(diag.BadUsage, "--from takes STACK=FILE, not %q", text).
			Try("--from megatron=args.txt")
	}
	return stack, file, nil
}

// parseTokens reads an amount such as 1T, 15.6T or 300B; here letters are powers of ten.
func parseTokens(text string) (float64, error) {
	if text == "" {
		return 0, nil
	}
	number, unit := text, 1.0
	for letter, size := range map[string]float64{"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12} {
		if rest, ok := strings.CutSuffix(strings.ToUpper(text), letter); ok {
			number, unit = rest, size
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !(n > 0) || n*unit > 1e18 {
		return 0, diag.New(diag.BadUsage, "%q is not a number of tokens", text).Try("--tokens 1T")
	}
	return n * unit, nil
}

// usualSeed is the seed of jitter if none is given.
const usualSeed = 1

// parseWhatIf reads what goes wrong: slow=FACTOR@RANK, links=FACTOR, jitter=SHARE, seed=NUMBER.
func parseWhatIf(text string) (w dryrun.WhatIf, err error) {
	seed, seen := uint64(usualSeed), map[string]bool{}
	for item := range strings.SplitSeq(text, ",") {
		if item == "" {
			continue
		}
		name, value, _ := strings.Cut(item, "=")
		if seen[name] {
			return w, diag.New(diag.BadUsage, "%s is given twice", name).At("--what-if %s", text).
				Try("leave one of them out")
		}
		seen[name] = true
		switch name {
		case "slow":
			factor, rank, some := strings.Cut(value, "@")
			if w.Slow, err = strconv.ParseFloat(factor, 64); err == nil && some {
				w.Straggler, err = strconv.Atoi(rank)
			}
		case "links":
			w.Links, err = strconv.ParseFloat(value, 64)
		case "jitter":
			w.Jitter, err = strconv.ParseFloat(value, 64)
		case "seed":
			seed, err = strconv.ParseUint(value, 10, 64)
		default:
			err = strconv.ErrSyntax
		}
		if err == nil && (name == "slow" && !(w.Slow > 0) || name == "links" && !(w.Links > 0)) {
			return w, diag.New(diag.BadUsage, "%q: a factor is more than 0", item).
				Try("--what-if %s=2, which takes twice as long", name)
		}
		if err != nil {
			return w, diag.New(diag.BadUsage, "%q is not a scenario", item).
				Try("--what-if slow=1.2@0,links=2,jitter=0.05,seed=7")
		}
	}
	if len(seen) > 0 {
		w.Random = rand.New(rand.NewPCG(seed, 0))
	}
	return w, nil
}

// parseBounds reads PRECISION=PERCENT.
func parseBounds(texts []string) (map[string]float64, error) {
	bounds := map[string]float64{}
	for _, text := range texts {
		name, value, _ := strings.Cut(text, "=")
		x, err := strconv.ParseFloat(value, 64)
		if err != nil || !(x > 0) {
			return nil, diag.New(diag.BadUsage, "%q is not a bound of a precision", text).
				Try("--bound nvfp4=0.5, in percent")
		}
		bounds[name] = x
	}
	return bounds, nil
}

// parseSteps reads which steps to trace: "10:13" is the four steps from 10 to 13, "10" is one.
// Steps are counted from 1, as the live line shows them.
func parseSteps(text string) (steps [2]int, err error) {
	if text == "" {
		return steps, nil
	}
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	from, err1 := strconv.Atoi(first)
	to, err2 := strconv.Atoi(last)
	const help = "give the first and the last step, for example --profile 10:13"
	switch {
	case err1 != nil || err2 != nil:
		return steps, diag.New(diag.BadUsage, "--profile %s does not name steps", text).Try(help)
	case from < 1:
		return steps, diag.New(diag.BadUsage, "--profile %s: steps are counted from 1", text).
			Try(help)
	case to < from:
		return steps, diag.New(diag.BadUsage, "--profile %s ends before it begins", text).
			Try("--profile %d:%d", to, from)
	}
	return [2]int{from, to}, nil
}
