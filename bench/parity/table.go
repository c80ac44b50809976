package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/deepwell/deepwell/parity"
)

// table writes the rows of docs/precision.md for results that were kept.
func table(w io.Writer, files []string) error {
	fmt.Fprintln(w, "| Runs | Against BF16 | Gap % (pairs) | sd | 95 % limits | Bound | Verdict |\n"+
		"|---|---|---|---|---|---|---|")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var r parity.Result
		if err := json.Unmarshal(text, &r); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		runs := runsOf(&r)
		list := append([]parity.Comparison{r.Null}, r.Matched...)
		list[0].Name = "null"
		list = append(list, r.Formats...)
		if c, ok := r.Between("all4", "nvfp4"); ok {
			list = append(list, c)
		}
		for _, c := range list {
			fmt.Fprintf(w, "| %s | %s |\n", runs, strings.Join(cells(c), " | "))
			runs = ""
		}
	}
	return nil
}

func runsOf(r *parity.Result) string {
	how := fmt.Sprintf("from scratch, %d steps, rate %g", r.Steps, r.Rate)
	if r.Branch {
		how = fmt.Sprintf("branch, %d steps from step %d, rate %g to 0", r.Steps, r.From, r.Rate)
	}
	return fmt.Sprintf("%.3gM, %s", float64(r.Parameters)/1e6, how)
}

func cells(c parity.Comparison) []string {
	signed := func(x float64) string {
		text := strings.Replace(fmt.Sprintf("%+.3f", x), "-", "−", 1)
		return strings.NewReplacer("−0.000", "0.000", "+0.000", "0.000").Replace(text)
	}
	var pairs []string
	for _, g := range c.Gaps {
		pairs = append(pairs, signed(g))
	}
	name := strings.NewReplacer("mxfp8", "MXFP8", "nvfp4", "NVFP4", "all4", "all FP4",
		"bf16", "BF16").Replace(c.Name)
	gap := fmt.Sprintf("**%s** (%s)", signed(c.Mean), strings.Join(pairs, ", "))
	spread, limits, bound := "", "", ""
	if c.Limits != nil {
		spread = fmt.Sprintf("%.3f", c.SD)
		limits = signed(c.Limits.Lower) + " … " + signed(c.Limits.Upper)
	}
	if c.Bound > 0 {
		bound = fmt.Sprintf("%g", c.Bound)
	}
	return []string{name, gap, spread, limits, bound, string(c.Is)}
}
