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

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/internal/strictjson"
	"github.com/deepwell/deepwell/tokenizer"
)

// A PeekJob says which row of which data to look at.
type PeekJob struct {
	Source    data.Source
	Tokenizer string // a file, or a folder that has one
	Seq       int    // tokens in a row
	Row       int64  // in the order of the files
	End       string // the token that closes documents; "" takes the tokenizer's
}

// A PeekResult is a row of data as training sees it, with what its source has.
type PeekResult struct {
	Source data.Stats  `json:"source"`
	Seq    int         `json:"seq"`
	Row    int64       `json:"row"`
	Count  int64       `json:"count"` // labels that count
	Tokens []PeekToken `json:"tokens"`
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
	v := e.begin(ctx, "data")
	tok := get(v, "read the tokenizer", func() (*tokenizer.Tokenizer, error) {
		return tokenizer.Load(job.Tokenizer)
	})
	loader := get(v, "read the data", func() (*data.Loader, error) {
		o := data.Options{Sources: []data.Source{job.Source}, Tokenizer: tok, Seq: job.Seq,
			End: job.End, Events: e.Events}
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
