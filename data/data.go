package data

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"path/filepath"
	"slices"
	"time"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/tokenizer"
)

// A Source is a place where documents come from.
type Source struct {
	// Name names the source in a Position; it must not change while a run goes on. Without one it
	// is "data", or the last part of the path if there are several sources.
	Name string
	// Path is a file, a folder, or a pattern in which * stands for any characters of a name and **
	// for any number of folders. Files are read in the order of their names.
	Path string
	// Format is the format of all files of the source; Auto infers it from their names.
	Format Format
	// Template is the chat template of the source; "" takes the template of the options.
	Template string
	// Columns names the columns of rows that call them otherwise than the kinds of rows that are
	// known do.
	Columns chat.Columns
	// Weight is the share of the rows that come from this source, in any unit. If no source has a
	// weight, each has its size as its weight.
	Weight float64
}

// Options say what to read and how to split it into sequences.
type Options struct {
	Sources   []Source
	Tokenizer *tokenizer.Tokenizer
	Seq       int    // tokens in a sequence
	Seed      uint64 // of the order
	Shuffle   bool   // false keeps the order of the files
	// Template is one of Templates, for chats. "" takes the template of ModelDir, or else the one
	// whose tokens the tokenizer has, which Builtin does in any case.
	Template string
	// ModelDir is a folder with the files of a model, which may bring its own chat template; "" is
	// no folder.
	ModelDir string
	// End is the token that closes every document. "" takes the one that the tokenizer has for it.
	End string
	// Joined treats each sequence as one text: positions run through it, there is one segment, and the
	// first token of a document is learned from the end of the one before.
	Joined bool
	// HoldoutSequences and HoldoutShare keep whole documents of every source out of training, for
	// [Loader.Eval]: enough to fill a number of sequences, or a share of them such as 0.01. They
	// are chosen by a hash of their contents, so that neither names nor order matter, and of a
	// document that is there twice no copy is trained on.
	HoldoutSequences int64
	HoldoutShare     float64
	// Document is how many bytes a document may have, or a line of jsonl; 0 is DefaultDocument. The
	// memory of reading grows with it. A text file may be longer: it is read in chunks.
	Document int64
	// Cache is the folder of token caches. Without one the tokens are made anew every time.
	Cache  string
	Events event.Sink

	now func() time.Time // time.Now, but in tests
}

// maxDocument bounds Options.Document: places in a document are counted in 32 bits.
const maxDocument = 1 << 30

// Stats say what a source has.
type Stats struct {
	Name      string `json:"name"`
	Files     int64  `json:"files"`
	Skipped   int64  `json:"skipped"` // files that are not text
	Documents int64  `json:"documents"`
	Bytes     int64  `json:"bytes"`  // of text; 0 if the files have tokens only
	Tokens    int64  `json:"tokens"` // with those that close documents
	Sequences int64  `json:"rows"`   // to train on
	HeldOut   int64  `json:"held"`   // sequences that were held out
	Cached    bool   `json:"cached"` // whether the tokens were there already
	// Share is the source's part of the rows of a mixture, from 0 to 1.
	Share float64 `json:"share,omitempty"`
	// Template says how chats are written, if there are any.
	Template string `json:"template,omitempty"`
	// Passed are the first of the skipped files, by name, with the reason.
	Passed []string `json:"passed,omitempty"`
	// Kinds are what the rows are, see [chat.Kind]; nil in caches of before there were several.
	Kinds []string `json:"kinds,omitempty"`
}

// A source is an open Source.
type source struct {
	*cache
	identity       cacheKey // what the run's digest has of it, see builder.identity
	path           string
	stats          Stats
	train, heldOut stream // what is trained on, and what was held out
}

// A Loader gives sequences of tokens. Any number of goroutines may use it at once.
type Loader struct {
	sources []*source
	split   int   // the version of it, see splitDocuments
	unsplit error // why whole documents cannot be held out, unless an old split was adopted
	shares  []int64
	digest  string
	options Options
}

// Open reads the sources, from their caches if they were read before.
func Open(ctx context.Context, o Options) (_ *Loader, err error) {
	o.Events = cmp.Or(o.Events, event.Discard)
	if o.Seq < 1 || o.Seq > 1<<30 {
		return nil, diag.New(diag.BadInput, "a sequence cannot have %d tokens", o.Seq)
	}
	if o.HoldoutSequences < 0 || !(o.HoldoutShare >= 0 && o.HoldoutShare < 1) {
		return nil, diag.New(diag.BadInput, "%d sequences or a share of %v cannot be held out",
			o.HoldoutSequences, o.HoldoutShare).Try("give a share such as 0.01, or a number of sequences")
	}
	if o.Document < 0 || o.Document > maxDocument {
		return nil, diag.New(diag.BadInput, "a document cannot have up to %d bytes", o.Document).
			Try("give a number of bytes up to %d", maxDocument)
	}
	if o.Sources, err = named(o.Sources); err != nil {
		return nil, err
	}
	b, err := newBuilder(&o)
	if err != nil {
		return nil, err
	}
	l := &Loader{options: o}
	defer func() {
		if err != nil {
			_ = l.Close()
		}
	}()
	for _, s := range o.Sources {
		b, err := b.with(s.Columns, cmp.Or(s.Template, o.Template))
		if err != nil {
			return nil, err
		}
		c, stats, err := b.open(ctx, s)
		if err != nil {
			return nil, err
		}
		l.sources = append(l.sources, &source{cache: c, identity: b.identity(c), path: s.Path,
			stats: stats})
	}
	if err := l.arrange(splitDocuments); err != nil {
		// A run that was begun with the first split may still go on with it: see Adopt.
		if l.arrange(splitRows) != nil {
			return nil, err
		}
		l.unsplit = err
	}
	return l, nil
}

// Ready tells whether rows can be taken for a new run, and warns where far more is held out than
// was asked for. Data of one document cannot be split, and serves only runs that [Loader.Adopt] it.
func (l *Loader) Ready() error {
	if l.unsplit == nil {
		l.warnHeldOut()
	}
	return l.unsplit
}

// arrange splits every source into what is trained on and what is held out, and finds the shares
// and the digest of that.
func (l *Loader) arrange(split int) (err error) {
	o := &l.options
	if !l.holdsOut() {
		split = splitRows // without a holdout there is no difference, and old digests hold
	}
	h := sha256.New()
	fmt.Fprintf(h, "deepwell rows %d\nseq %d seed %d shuffle %t joined %t\n", split, o.Seq, o.Seed,
		o.Shuffle, o.Joined)
	if split == splitDocuments {
		fmt.Fprintf(h, "held %x %d\n", threshold(o.HoldoutShare), o.HoldoutSequences)
	}
	var shared *claims
	if split == splitDocuments {
		shared = l.claim()
	}
	for _, s := range l.sources {
		if err := l.divide(s, split, shared); err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %x %d\n", s.stats.Name, s.identity, s.stats.Sequences)
	}
	if l.holdsOut() && l.EvalSequences() == 0 {
		return l.nothingHeldOut()
	}
	if l.shares, err = newShares(l.weights()); err != nil {
		return err
	}
	fmt.Fprintf(h, "%d\n", l.shares)
	l.split, l.digest = split, fmt.Sprintf("%x", h.Sum(nil))
	return nil
}

// Adopt makes the loader one with a digest, if it can be: a run that was begun when the last rows
// of a source were held out, not whole documents, goes on with them. It must be called before the
// first row is taken.
func (l *Loader) Adopt(digest string) bool {
	now := l.split
	if l.digest == digest {
		l.unsplit = nil
		return true
	}
	if now == splitRows {
		return false
	}
	if err := l.arrange(splitRows); err == nil && l.digest == digest {
		return true
	}
	_ = l.arrange(now) // it was possible before
	return false
}

// named gives every source a name of its own, and sorts them by name: then the order in which they
// are listed changes nothing.
func named(list []Source) ([]Source, error) {
	if len(list) == 0 {
		return nil, diag.New(diag.BadInput, "there is no source of data").
			Try("name a file, a folder, or a pattern such as 'corpus/**/*.txt'")
	}
	list = slices.Clone(list)
	for i := range list {
		switch s := &list[i]; {
		case s.Name != "":
		case len(list) == 1:
			s.Name = "data"
		default:
			s.Name = filepath.Base(s.Path)
		}
	}
	lists.Sort(list, func(a, b Source) int { return cmp.Compare(a.Name, b.Name) })
	for i := range list[1:] {
		if list[i].Name == list[i+1].Name {
			return nil, diag.New(diag.BadInput, "two sources are called %q", list[i].Name).
				Try("give every source a name of its own")
		}
	}
	return list, nil
}

// weights returns the options' weights, or else the sizes of the sources.
func (l *Loader) weights() []float64 {
	weights := make([]float64, len(l.sources))
	given := slices.ContainsFunc(l.options.Sources, func(s Source) bool { return s.Weight != 0 })
	for i, s := range l.sources {
		if weights[i] = float64(s.stats.Sequences); given {
			weights[i] = l.options.Sources[i].Weight
		}
	}
	return weights
}

// Close gives back what the caches hold. The loader must not be used any more.
func (l *Loader) Close() error {
	errs := lists.Map(l.sources, func(s *source) error { return s.release() })
	l.sources = nil
	return errors.Join(errs...)
}

// Stats describes the sources, by name.
func (l *Loader) Stats() []Stats {
	list := lists.Map(l.sources, func(s *source) Stats { return s.stats })
	if len(list) > 1 {
		for i := range list {
			list[i].Share = float64(l.shares[i]) / whole
		}
	}
	return list
}

// Sequences counts the sequences to train on, of all sources.
func (l *Loader) Sequences() int64 {
	return lists.Sum(l.sources, func(s *source) int64 { return s.stats.Sequences })
}

// Tokens counts the tokens of all sources.
func (l *Loader) Tokens() int64 {
	return lists.Sum(l.sources, func(s *source) int64 { return s.tokens })
}

// Digest names all that decides which sequences come in which order: contents, tokenizer, options,
// weights and the version of the split. A run that resumes with another digest sees other data.
func (l *Loader) Digest() string { return l.digest }

// Texts gives the text of every document of the sources, to train a tokenizer on; of a chat, what
// was said. It ends at the first error.
func Texts(ctx context.Context, sources []Source) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for _, s := range sources {
			files, _, err := s.files()
			if err == nil {
				err = texts(ctx, s.Columns, files, yield)
			}
			if errors.Is(err, errEnough) {
				return
			}
			if err != nil {
				yield("", stopped(ctx, err))
				return
			}
		}
	}
}

// errEnough says that no more texts are wanted.
var errEnough = errors.New("enough")

// texts yields the documents of files in order, for training a tokenizer.
func texts(ctx context.Context, columns chat.Columns, files []*file,
	yield func(string, error) bool) error {
	for _, f := range files {
		err := readers[f.format](ctx, f, func(it item) error {
			if it.ids != nil {
				return diag.New(diag.DataFormat, "%s has tokens and no text", f.name).At("%s", f.path).
					Try("name the files that it was made from")
			}
			if err := it.parse(columns); err != nil {
				return err
			}
			if it.text != "" {
				it.chat = []chat.Message{{Content: it.text}}
			}
			for _, m := range it.chat {
				if !yield(m.Content, nil) {
					return errEnough
				}
			}
			return ctx.Err()
		})
		if _, ok := errors.AsType[errNoText](err); err != nil && !ok {
			return err
		}
	}
	return nil
}
