package deepwell

import (
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/price"
)

// calibrationFile is what a calibration is called in the folder of its run.
const calibrationFile = "calibration.json"

// calibrate corrects a search's predictions by measured runs. Each name is a calibration file, or
// the folder of a run, for which the file is written. It returns the number of runs used.
func calibrate(names []string, s *autoplan.Job) (int, error) {
	var all autoplan.Calibration
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			return 0, diag.New(diag.FileError, "cannot read what to calibrate by").At("%s", name).Wrap(err)
		}
		read := readCalibration
		if info.IsDir() { // held to the prices of the same stack
			read = func(name string) (*autoplan.Calibration, error) {
				return calibrateRun(name, s.Profile.Name)
			}
		}
		c, err := read(name)
		if err != nil {
			return 0, err
		}
		all.Runs = append(all.Runs, c.Runs...)
	}
	s.Correction = all.For(s)
	return s.Correction.Runs, nil
}

func readCalibration(path string) (*autoplan.Calibration, error) {
	text, err := safedir.ReadPlain(path, maxText)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read the calibration").At("%s", path).Wrap(err)
	}
	return autoplan.ParseCalibration(text, path)
}

// policyFile is where a run's folder has the policy that its recipe named.
const policyFile = "policy.json"

// calibrateRun holds a run to its prediction and writes what comes of it into the run's folder.
func calibrateRun(dir, stack string) (*autoplan.Calibration, error) {
	seconds, err := stepsOf(filepath.Join(dir, "events.jsonl"))
	if err != nil {
		return nil, err
	}
	m, ok := autoplan.NewMeasurement(seconds)
	if !ok {
		return nil, diag.New(diag.BadInput, "the run has %d steps; those that warm up do not count",
			len(seconds)).At("%s", dir).Try("train for 10 steps or more")
	}
	path := filepath.Join(dir, "plan.json")
	if _, err := os.Stat(path); err != nil {
		return nil, diag.New(diag.FileError, "the run's folder has no plan").At("%s", path).Wrap(err).
			Try("copy the plan that the run was started with to %s", path)
	}
	r := &dryRunner{job: DryRunJob{Plan: path, Stack: stack}, done: &DryRunResult{}}
	if file := filepath.Join(dir, policyFile); stack == "" || stack == price.Own {
		if _, err := os.Stat(file); err == nil {
			r.job.Precision = file
		}
	}
	for _, do := range []func() error{r.read, r.price, r.simulate} {
		if err := do(); err != nil {
			return nil, err
		}
	}
	m.Model, m.GPU, m.Stack = r.plan.Model, r.search.Cluster.GPU.Name, r.search.Profile.Name
	m.Precision, m.Predicted = r.plan.Precision, r.done.Step
	c := &autoplan.Calibration{Runs: []autoplan.Measurement{m}}
	text, err := c.Marshal()
	if err != nil {
		return nil, err
	}
	out := filepath.Join(dir, calibrationFile)
	return c, unwritten(atomicfile.Write(out, text, 0o644), "the calibration", out)
}

// stepsOf reads the seconds of a run's steps from its events.
func stepsOf(path string) ([]float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read the run's events").At("%s", path).Wrap(err)
	}
	defer func() { _ = f.Close() }()
	var list []float64
	for record, err := range event.Read(f) {
		if err != nil {
			return nil, diag.New(diag.BadInput, "the run's events cannot be read").At("%s", path).
				Wrap(err).Try("deepwell train writes events.jsonl; name the folder of a run")
		}
		if s, ok := record.Event.(event.Step); ok {
			list = append(list, s.Seconds)
		}
	}
	return list, nil
}
