package deepwell

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/parallel"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A CompileJob is what to compile, for what.
type CompileJob struct {
	Source string // a .mlir file, a program file, a plan, or the name of a model
	// Seq and Batch are tokens in a sequence, and sequences, of a model's step; 0 are 2,048, or the
	// model's context if that is less, and 1. Files have their own: for them both must be 0.
	Seq, Batch   int64
	Cluster      string         // NxGPU or Nxcpu; "" is the plan's. A plan needs N devices
	Precision    string         // of linear layers of a plan or a model; "" is the plan's, or bf16
	Flags        map[string]any // XLA options on top of the program's own
	WithoutCuDNN bool           // make no cuDNN plans, to see what they add
}

// Compile compiles every module of a program with XLA for the cluster, which need not be at hand,
// and reports memory, kernels and collectives. If the program does not fit a device, there is a
// result beside the error.
func (e *Env) Compile(ctx context.Context, job CompileJob) (*CompileResult, error) {
	v := e.begin(ctx, "compile")
	var foot []*step.Footprint
	cluster := get(v, "read the cluster", func() (machine.Cluster, error) { return clusterOf(job) })
	from := get(v, "read the program", func() (*source, error) {
		from, err := readSource(job, cluster)
		if err == nil {
			e.warn(from.warnings)
		}
		return from, err
	})
	reports := get(v, "compile the stages", func() ([]*engine.Report, error) {
		return e.compileStages(ctx, from, cluster, job)
	})
	v.pass("compare with the GPU's memory", func() error {
		if len(reports) > 0 {
			last := reports[len(reports)-1]
			last.Notes = append(last.Notes, from.notes...)
		}
		for _, r := range reports {
			if err := r.Fits(); err != nil {
				return err
			}
		}
		return nil
	})
	if from != nil && from.planned != nil {
		v.pass("compare the collectives with the plan", func() error {
			return from.keepsToPlan(reports, cluster.CPU())
		})
		v.pass("add up the memory of a device", func() (err error) {
			foot, err = from.footprints(reports)
			for _, f := range foot {
				err = cmp.Or(err, f.Fits())
			}
			return err
		})
	}
	made := &CompileResult{Stages: reports, Ranks: foot, Census: v.err == nil && foot != nil}
	if from != nil {
		made.Warnings = from.warnings
	}
	return made, v.err
}

// A CompileResult describes the compiled modules of a program and, for a plan, the memory of a
// device while it trains.
type CompileResult struct {
	Stages []*engine.Report `json:"stages"`
	// Ranks has the memory of each pipeline rank of a plan; one if it has no pipeline.
	Ranks []*step.Footprint `json:"ranks,omitempty"`
	// Census reports that the compiled programs have exactly the collectives of the plan's graphs:
	// count, groups, tensors and bytes.
	Census bool `json:"census,omitempty"`
	// Warnings name what a run on this cluster would compute differently from what one may expect.
	Warnings []string `json:"warnings,omitempty"`
}

// maxProgram bounds a program file: a step for 16,384 GPUs with its replica groups written out
// was 15 MB.
const maxProgram = 1 << 30

// readSource reads a file, or writes the step of a model that is named.
func readSource(job CompileJob, c machine.Cluster) (*source, error) {
	if _, err := os.Stat(job.Source); err != nil && !looksLikeFile(job.Source) {
		p, err := model.Find(job.Source)
		if err != nil {
			return nil, err
		}
		if p.Config == nil {
			return nil, diag.New(diag.ModelUnknown, "the sizes of %s are not public", p.Name).
				Try("deepwell models lists what is known; or give the folder of a config.json")
		}
		return stepOf(p.Name, p.Config, c, job)
	}
	if filepath.Ext(job.Source) == ".pt2" {
		m, err := capture.Open(job.Source, capture.Options{})
		if err != nil {
			return nil, err
		}
		defer func() { _ = m.Close() }()
		return stepOf(m.Name, m.Trained(), c, job)
	}
	if job.Seq != 0 || job.Batch != 0 {
		return nil, diag.New(diag.BadUsage, "%s has its own sequence length and batch", job.Source).
			Try("leave --seq and --batch out; a plan has the keys seq and batch")
	}
	if isPlan(job.Source) {
		return programOf(job, c)
	}
	p, err := readProgram(job.Source, c.Count)
	return &source{program: p}, err
}

// clusterOf is the cluster to compile for: the job's, or else the plan's.
func clusterOf(job CompileJob) (machine.Cluster, error) {
	if job.Cluster == "" && isPlan(job.Source) {
		p, err := readPlan(job.Source)
		if err != nil {
			return machine.Cluster{}, err
		}
		job.Cluster = p.Cluster
	}
	return machine.ParseCluster(job.Cluster)
}

// looksLikeFile distinguishes the path of a missing file from a model's name.
func looksLikeFile(source string) bool {
	known := []string{".mlir", ".program", ".dw", ".txt", ".json"}
	return strings.ContainsAny(source, `/\`) || slices.Contains(known, filepath.Ext(source))
}

// readProgram reads a program file, or a bare StableHLO module to be run on n devices.
func readProgram(path string, n int) (*program.Program, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, diag.New(diag.FileError, "there is no file %s", path).Wrap(err).
			Try("give the path of a .mlir file or of a program file")
	case err != nil:
		return nil, diag.New(diag.FileError, "cannot read %s", path).Wrap(err)
	case !info.Mode().IsRegular() || info.Size() > maxProgram:
		return nil, diag.New(diag.BadInput, "%s is not a file of program text", path).
			Try("give a .mlir file or a program file of at most 1 GiB")
	}
	data, err := safedir.ReadPlain(path, maxProgram)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", path).Wrap(err)
	}
	if bytes.HasPrefix(data, []byte("deepwell program ")) {
		p, err := program.Parse(data)
		if err != nil {
			return nil, at(err, path)
		}
		return p, nil
	}
	if !bytes.Contains(data, []byte("module")) && !bytes.Contains(data, []byte("func.func")) {
		return nil, diag.New(diag.BadInput, "%s holds no module", path).
			Try("give a StableHLO module as text, or a program file")
	}
	return program.FromText(stageNameOf(path), string(data), n), nil
}

var notInStageName = regexp.MustCompile(`[^A-Za-z0-9_.-]+`)

// stageNameOf makes a stage's name of a file's.
func stageNameOf(path string) string {
	base := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	name := strings.TrimLeft(notInStageName.ReplaceAllString(base, "_"), ".-")
	if name == "" {
		return "program"
	}
	return name
}

// at adds the file to an error's place.
func at(err error, path string) error {
	e := diag.From(err)
	if e.Where == "" {
		return e.At("%s", path)
	}
	return e.At("%s, %s", path, e.Where)
}

// compileStages compiles for the cluster: on the local devices if it is made of them, and for a
// described target if not. The longest modules come first, and if there are several of them two
// children compile.
func (e *Env) compileStages(ctx context.Context, from *source, c machine.Cluster,
	job CompileJob) ([]*engine.Report, error) {
	list := from.program.Modules
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	lists.Sort(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(len(list[b].Text), len(list[a].Text)), cmp.Compare(a, b))
	})
	workers := 1
	if len(list) > 1 && e.Child != "" && !c.CPU() && len(list[order[1]].Text) > longModule {
		workers = min(2, runtime.NumCPU())
	}
	options := isolate.Options{Child: e.Child, Engines: e.Engines, Environ: e.Environ, Cluster: c,
		Cache: e.Cache, WithoutCuDNN: job.WithoutCuDNN,
		Ahead: from.planned != nil && from.planned.Plan.Ahead(), Events: e.Events}
	idle := make(chan *isolate.Compiler, workers)
	for range workers {
		compiler, err := isolate.Open(ctx, options)
		if err != nil {
			return nil, err
		}
		defer compiler.Close()
		idle <- compiler
	}
	reports := make([]*engine.Report, len(list))
	compile := func(n int) (err error) {
		compiler, i := <-idle, order[n]
		defer func() { idle <- compiler }()
		s := list[i]
		if len(job.Flags) > 0 {
			s.Flags = maps.Clone(s.Flags)
			if s.Flags == nil {
				s.Flags = map[string]any{}
			}
			maps.Copy(s.Flags, job.Flags)
		}
		if reports[i], err = compiler.Compile(ctx, &s); err != nil {
			return at(err, job.Source)
		}
		if c.Note != "" {
			reports[i].Notes = append(reports[i].Notes, c.Note)
		}
		return nil
	}
	err := parallel.Each(workers, len(list), func() func(int) error { return compile })
	if err != nil {
		return nil, err
	}
	return reports, nil
}

// longModule is the bytes of a module that XLA compiles for a quarter of a minute or more: the
// gradient of mixtral-8x7b in MXFP8 with half batches has 0.66 MB.
const longModule = 1 << 19
