package deepwell

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/internal/strictjson"
	"github.com/deepwell/deepwell/tokenizer"
)

// A PeekJob says which row of which data to look at. With a Recipe, the data is a run's, and Source
// has the name of one of its sources, or none.
type PeekJob struct {
	Recipe    string   // the path of a run.toml; "" if Source says it all
	Set       []string // overrides of the recipe: key=value
	Source    data.Source
	Tokenizer string // a file, or a folder that has one
	Seq       int    // tokens in a row
	Row       int64  // in the order of the files
	End       string // the token that closes documents; "" takes the tokenizer's
}

// A PeekResult is a row of data as training sees it, with what its source has.
type PeekResult struct {
	Source data.Stats  `json:"source"`
	Run    *PeekRun    `json:"run,omitempty"` // what the run's data is, if a recipe was given
	Seq    int         `json:"seq"`
	Row    int64       `json:"row"`
	Count  int64       `json:"count"` // labels that count
	Tokens []PeekToken `json:"tokens"`
}

// A PeekRun is the data of a run.
type PeekRun struct {
	Sources []data.Stats `json:"sources"`
	Eval    []data.Stats `json:"eval,omitempty"` // data of its own; nil if a share is held out
	Steps   int          `json:"steps"`
	Batch   int          `json:"batch"`
	Epochs  float64      `json:"epochs"` // how often the run goes through the data
}

// A PeekToken is one token of a row.
type PeekToken struct {
	ID       int32  `json:"id"`
	Text     string `json:"text"` // what can be read once this token is there
	Learned  bool   `json:"learned"`
	Document int32  `json:"document"` // number within the row
	Position int32  `json:"position"` // place within the document
}

// Peek tokenizes data as a training run does and shows one row.
func (e *Env) Peek(ctx context.Context, job PeekJob) (*PeekResult, error) {
	if job.Recipe != "" {
		return e.peekRun(ctx, job)
	}
	v := e.begin(ctx, "data")
	tok := get(v, "read the tokenizer", func() (*tokenizer.Tokenizer, error) {
		return tokenizer.Load(job.Tokenizer)
	})
	loader := get(v, "read the data", func() (*data.Loader, error) {
		o := data.Options{Sources: []data.Source{job.Source}, Tokenizer: tok, Seq: job.Seq,
			End: job.End, Events: e.Events}
		if file, err := tokenizer.Find(job.Tokenizer); err == nil {
			o.ModelDir = filepath.Dir(file)
		}
		if e.Cache != "" {
			o.Cache = filepath.Join(e.Cache, "tokens")
		}
		return data.Open(ctx, o)
	})
	peek := get(v, "take a row", func() (*PeekResult, error) {
		stats := loader.Stats()[0]
		batch, err := loader.Row(stats.Name, job.Row)
		if err != nil {
			return nil, errors.Join(err, loader.Close())
		}
		return newPeek(tok, stats, batch, job.Row), loader.Close()
	})
	return peek, v.err
}

// peekRun shows a row of a run's data.
func (e *Env) peekRun(ctx context.Context, job PeekJob) (*PeekResult, error) {
	v := e.begin(ctx, "data")
	r := &runner{env: e, job: TrainJob{Path: job.Recipe, Set: job.Set}}
	defer r.close()
	v.pass("read the recipe", r.readRecipe)
	v.pass("find the model", func() (err error) {
		if r.model, err = r.openModel(); err != nil {
			return at(err, job.Recipe+": model")
		}
		return nil
	})
	v.pass("read the data", func() error { return r.readData(ctx) })
	peek := get(v, "take a row", func() (*PeekResult, error) {
		if err := r.rows.Ready(); err != nil {
			return nil, err
		}
		run := &PeekRun{Sources: r.rows.Stats(), Steps: r.recipe.Steps, Batch: r.recipe.Batch,
			Epochs: r.epochs()}
		if r.held != nil && r.held != r.rows {
			run.Eval = r.held.Stats()
		}
		names := lists.Map(run.Sources, func(s data.Stats) string { return s.Name })
		i := max(0, slices.Index(names, job.Source.Name))
		if job.Source.Name != "" && names[i] != job.Source.Name {
			return nil, diag.New(diag.BadInput, "the run has no source %q", job.Source.Name).
				Meant(job.Source.Name, names, "did you mean %s?", "choose one of "+strings.Join(names, ", "))
		}
		batch, err := r.rows.Row(names[i], job.Row)
		if err != nil {
			return nil, err
		}
		peek := newPeek(r.tokens, run.Sources[i], batch, job.Row)
		peek.Run = run
		return peek, nil
	})
	return peek, v.err
}

// rowKinds says what the rows of the data are and how chats are written; "" if all are texts. How
// much there is of it, and how often the run goes through it, is in the run's first lines.
func (r *runner) rowKinds() string {
	var kinds, templates []string
	for _, s := range r.rows.Stats() {
		kinds = append(kinds, s.Kinds...)
		if s.Template != "" {
			templates = append(templates, s.Template)
		}
	}
	slices.Sort(kinds)
	slices.Sort(templates)
	kinds, templates = slices.Compact(kinds), slices.Compact(templates)
	text := "rows: " + strings.Join(kinds, ", ")
	if len(templates) > 0 {
		text += "; chat template: " + strings.Join(templates, " and ")
	}
	if len(kinds) == 0 || slices.Equal(kinds, []string{chat.PlainText.String()}) {
		return ""
	}
	return text
}

// epochs is how often the run goes through its data.
func (r *runner) epochs() float64 {
	return float64(r.recipe.Steps) * float64(r.recipe.Batch) / float64(r.rows.Sequences())
}

// newPeek spells a row. A token is learned if it is the label of the one before it; the first of a
// row is given.
func newPeek(t *tokenizer.Tokenizer, stats data.Stats, b *data.Batch, row int64) *PeekResult {
	p := &PeekResult{Source: stats, Seq: b.Seq, Row: row, Count: b.Count}
	stream := t.Stream(tokenizer.Options{KeepSpecial: true})
	for i, id := range b.IDs {
		p.Tokens = append(p.Tokens, PeekToken{ID: id, Text: stream.Next(id),
			Learned:  i > 0 && b.Labels[i-1] != data.Ignored,
			Document: b.Segments[i], Position: b.Positions[i]})
	}
	p.Tokens[len(p.Tokens)-1].Text += stream.End()
	return p
}

// A TokenizerJob says what to train a tokenizer on.
type TokenizerJob struct {
	Sources []data.Source
	Vocab   int      // tokens at most
	Special []string // special tokens; the first one ends a text
	Out     string   // the tokenizer.json to write
}

// A TokenizerResult describes the tokenizer that was written.
type TokenizerResult struct {
	Path   string `json:"path"`
	Tokens int    `json:"tokens"`
	Texts  int64  `json:"texts"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// TrainTokenizer learns a byte-level BPE from data and writes it as Hugging Face does.
func (e *Env) TrainTokenizer(ctx context.Context, job TokenizerJob) (*TokenizerResult, error) {
	v := e.begin(ctx, "tokenizer")
	report := &TokenizerResult{Path: job.Out}
	config := tokenizerConfig{Class: "PreTrainedTokenizerFast"}
	beside := filepath.Join(filepath.Dir(job.Out), "tokenizer_config.json")
	v.pass("look at what is there", func() error {
		if len(job.Special) > 0 {
			config.EOS = job.Special[0]
		}
		return config.mayReplace(beside)
	})
	file := get(v, "read the text and learn", func() ([]byte, error) {
		return e.learn(ctx, job, report)
	})
	v.pass("write the tokenizer", func() error {
		t, err := tokenizer.Parse(file)
		if err != nil {
			return err
		}
		report.Tokens, report.SHA256 = t.Size(), fmt.Sprintf("%x", sha256.Sum256(file))
		err = os.MkdirAll(filepath.Dir(job.Out), 0o777)
		if err == nil {
			err = atomicfile.Write(job.Out, file, 0o644)
		}
		if text, _ := strictjson.Encode(config); err == nil { // strings always encode
			err = atomicfile.Write(beside, text, 0o644)
		}
		return unwritten(err, "the tokenizer", job.Out)
	})
	return report, v.err
}

// learn hands the texts to the trainer and counts them.
func (e *Env) learn(ctx context.Context, job TokenizerJob, r *TokenizerResult) ([]byte, error) {
	var failed error
	texts := func(yield func(string) bool) {
		for text, err := range data.Texts(ctx, job.Sources) {
			if failed = err; err != nil || !yield(text) {
				return
			}
			r.Texts++
			r.Bytes += int64(len(text))
			e.Events.Emit(event.Progress{Task: "read text", Done: r.Bytes, Unit: "B"})
		}
	}
	file, err := tokenizer.Train(texts, job.Vocab, job.Special...)
	switch {
	case failed != nil:
		return nil, failed
	case err != nil:
		return nil, err
	case r.Bytes == 0:
		return nil, diag.New(diag.DataEmpty, "no text was found").At("%s", job.Sources[0].Path).
			Try("name a file, a folder, or a pattern such as 'corpus/**/*.txt'")
	}
	return file, nil
}

// A tokenizerConfig is the file beside a tokenizer.json that says which token ends a text.
type tokenizerConfig struct {
	EOS   string `json:"eos_token,omitempty"`
	Class string `json:"tokenizer_class"`
}

// mayReplace refuses to write over the settings of another tokenizer: they say more than ours.
func (tokenizerConfig) mayReplace(path string) error {
	text, err := safedir.ReadPlain(path, maxText)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var keys map[string]any
	if err == nil {
		err = json.Unmarshal(text, &keys)
	}
	delete(keys, "eos_token")
	delete(keys, "tokenizer_class")
	if err != nil || len(keys) > 0 {
		return diag.New(diag.BadInput, "the folder has the settings of another tokenizer").
			At("%s", path).Wrap(err).Try("write into another folder, with -o")
	}
	return nil
}
