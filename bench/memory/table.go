package main

import (
	"encoding/csv"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// table is the committed file of compiled figures.
const table = "testdata/compiled.csv"

var header = []string{"cluster", "model", "plan", "ranks", "programs"}

// A row is what the compiler said of a combination.
type row struct {
	cluster, model, key string
	ranks               []*step.Footprint
	programs            []need
}

// A need is the memory of one program.
type need struct {
	name string
	step.Needs
}

// add keeps what a program needs, once.
func (r *row) add(name string, n step.Needs) {
	if !slices.ContainsFunc(r.programs, func(x need) bool { return x.name == name }) {
		r.programs = append(r.programs, need{name, n})
	}
}

// peak is what the worst rank holds.
func (r *row) peak() *step.Footprint {
	return slices.MaxFunc(r.ranks, func(a, b *step.Footprint) int {
		return int(min(max(a.Sum()-b.Sum(), -1), 1))
	})
}

// record writes a row as fields: of a rank optimizer, params, gradients, activations, temp and the
// program that runs then; of a program temp, output and alias.
func (r *row) record() []string {
	var ranks, programs []string
	for _, f := range r.ranks {
		ranks = append(ranks, fmt.Sprint(f.Optimizer, " ", f.Params, " ", f.Grads, " ", f.Activations,
			" ", f.Temp, " ", f.Largest))
	}
	for _, p := range r.programs {
		programs = append(programs, fmt.Sprint(p.name, " ", p.Temp, " ", p.Output, " ", p.Alias))
	}
	return []string{r.cluster, r.model, r.key, strings.Join(ranks, "; "), strings.Join(programs, "; ")}
}

// parse reads what record wrote.
func parse(f []string) (*row, error) {
	r := &row{cluster: f[0], model: f[1], key: f[2]}
	bad := func(what string) error {
		return diag.New(diag.BadInput, "%q is no part of a row", what).At("%s", table)
	}
	for text := range strings.SplitSeq(f[3], "; ") {
		w := strings.Fields(text)
		if len(w) != 6 {
			return nil, bad(text)
		}
		n, ok := numbers(w[:5])
		if !ok {
			return nil, bad(text)
		}
		r.ranks = append(r.ranks, &step.Footprint{Rank: len(r.ranks), Largest: w[5],
			Memory: program.Memory{Optimizer: n[0], Params: n[1], Grads: n[2], Activations: n[3],
				Temp: n[4]}})
	}
	for text := range strings.SplitSeq(f[4], "; ") {
		w := strings.Fields(text)
		if len(w) != 4 {
			return nil, bad(text)
		}
		n, ok := numbers(w[1:])
		if !ok {
			return nil, bad(text)
		}
		r.add(w[0], step.Needs{Temp: n[0], Output: n[1], Alias: n[2]})
	}
	return r, nil
}

func numbers(words []string) (list []int64, ok bool) {
	for _, w := range words {
		n, err := strconv.ParseInt(w, 10, 64)
		if err != nil {
			return nil, false
		}
		list = append(list, n)
	}
	return list, true
}

// read reads a table.
func read(path string) (rows []*row, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	in := csv.NewReader(f)
	in.FieldsPerRecord = len(header)
	all, err := in.ReadAll()
	if err != nil {
		return nil, err
	}
	for _, record := range all[1:] {
		r, err := parse(record)
		if err != nil {
			return nil, err
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// save writes a table.
func save(path string, rows []*row) error {
	var b strings.Builder
	out := csv.NewWriter(&b)
	records := [][]string{header}
	for _, r := range rows {
		records = append(records, r.record())
	}
	if err := out.WriteAll(records); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}
