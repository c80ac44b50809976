// Command curve compares the loss curves of two runs, step by step, and fails if they part by more
// than a bound.
//
// A curve is the events.jsonl of a run, or CSV whose first line names the columns, two of which are
// step and loss, as torch_run.py prints it.
package main

import (
	"bufio"
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/event"
)

func main() {
	limit := flag.Float64("limit", 1, "the largest difference of a step, in percent")
	window := flag.Int("window", 20, "steps that the smoothed curves are means of")
	single := flag.Bool("csv", false, "print one curve as CSV instead")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: curve [flags] OURS THEIRS, or curve -csv CURVE")
		flag.PrintDefaults()
	}
	flag.Parse()
	if *single && flag.NArg() == 1 {
		if err := printCurve(os.Stdout, flag.Arg(0)); err != nil {
			fmt.Fprintln(os.Stderr, "curve:", err)
			os.Exit(2)
		}
		return
	}
	if flag.NArg() != 2 || *window < 1 {
		flag.Usage()
		os.Exit(2)
	}
	ok, err := run(os.Stdout, flag.Arg(0), flag.Arg(1), *limit/100, *window)
	if err != nil {
		fmt.Fprintln(os.Stderr, "curve:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// run compares two files and tells whether they agree.
func run(w io.Writer, ours, theirs string, limit float64, window int) (bool, error) {
	a, err := readFile(ours)
	if err != nil {
		return false, err
	}
	b, err := readFile(theirs)
	if err != nil {
		return false, err
	}
	a, b, steps := common(a, b)
	if len(steps) == 0 {
		return false, errors.New("the curves have no step in common")
	}
	last := len(steps) - 1
	fmt.Fprintf(w, "%d steps, %d to %d: the loss goes from %.4f to %.4f, and from %.4f to %.4f\n",
		len(steps), steps[0], steps[last], a[0].loss, a[last].loss, b[0].loss, b[last].loss)
	raw := compare(losses(a), losses(b))
	fmt.Fprintf(w, "by step:            %s\n", raw.text(steps))
	smooth := compare(means(losses(a), window), means(losses(b), window))
	fmt.Fprintf(w, "means of %3d steps: %s\n", window, smooth.text(steps))
	ok := raw.worst <= limit // false for what is not a number
	verdict := "within"
	if !ok {
		verdict = "beyond"
	}
	fmt.Fprintf(w, "%s %.3g %% by step\n", verdict, 100*limit)
	return ok, nil
}

// printCurve prints a curve as CSV, as it is committed.
func printCurve(w io.Writer, path string) error {
	curve, err := readFile(path)
	if err != nil {
		return err
	}
	fmt.Fprintln(w, "step,loss")
	for _, p := range curve {
		fmt.Fprintf(w, "%d,%.9g\n", p.step, p.loss)
	}
	return nil
}

// A point is one step of a curve.
type point struct {
	step int
	loss float64
}

func readFile(path string) ([]point, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	curve, err := read(bufio.NewReader(f))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return curve, nil
}

// read reads a curve in either form.
func read(r *bufio.Reader) (curve []point, err error) {
	first, err := r.Peek(1)
	if err != nil {
		return nil, errors.New("the file is empty")
	}
	if first[0] == '{' {
		steps, _, err := event.Curve(r)
		for _, s := range steps {
			curve = append(curve, point{s.Step, float64(s.Loss)})
		}
		return curve, err
	}
	rows := csv.NewReader(r)
	head, err := rows.Read()
	if err != nil {
		return nil, err
	}
	step, loss := slices.Index(head, "step"), slices.Index(head, "loss")
	if step < 0 || loss < 0 {
		return nil, fmt.Errorf("the first line is %q; it must name the columns step and loss", head)
	}
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			return curve, nil
		}
		if err != nil {
			return nil, err
		}
		n, err := strconv.Atoi(row[step])
		if err != nil {
			return nil, err
		}
		x, err := strconv.ParseFloat(row[loss], 64)
		if err != nil {
			return nil, err
		}
		curve = append(curve, point{n, x})
	}
}

// common gives the steps that both curves have.
func common(a, b []point) (as, bs []point, steps []int) {
	at := map[int]point{}
	for _, p := range b {
		at[p.step] = p
	}
	for _, p := range a {
		if q, ok := at[p.step]; ok {
			as, bs, steps = append(as, p), append(bs, q), append(steps, p.step)
		}
	}
	return as, bs, steps
}

func losses(curve []point) []float64 {
	list := make([]float64, len(curve))
	for i, p := range curve {
		list[i] = p.loss
	}
	return list
}

// means gives, for each number, the mean of it and the n-1 before it.
func means(list []float64, window int) []float64 {
	out, sum := make([]float64, len(list)), 0.0
	for i, v := range list {
		sum += v
		if i >= window {
			sum -= list[i-window]
		}
		out[i] = sum / float64(min(i+1, window))
	}
	return out
}

// A difference is how far two curves are apart, relative to the second.
type difference struct {
	worst, mean float64
	at          int // where the worst is
}

func compare(a, b []float64) difference {
	d := difference{}
	for i := range a {
		x := math.Abs(a[i]-b[i]) / math.Abs(b[i])
		if !(x <= d.worst) { // what is not a number is the worst
			d.worst, d.at = x, i
		}
		if math.IsNaN(x) {
			return difference{x, x, i}
		}
		d.mean += x / float64(len(a))
	}
	return d
}

func (d difference) text(steps []int) string {
	return fmt.Sprintf("at most %.3g %% apart (step %d), %.3g %% in the mean", 100*d.worst,
		steps[d.at], 100*d.mean)
}
