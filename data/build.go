package data

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/tokenizer"
)

// chunkBytes is how much text goes to a goroutine at once: enough that handing it over costs
// nothing, little enough that the last one to finish does not keep the others waiting.
const chunkBytes = 1 << 18

// ticketBytes is what one ticket lets into memory. As long documents take more tickets, the text
// that is on its way is bounded, whatever its form.
const ticketBytes = 1 << 20

// maxTickets are enough for the longest document.
func (b *builder) maxTickets() int { return 2 + b.limit/ticketBytes }

// tickets is how many a chunk needs.
func (b *builder) tickets(c *chunk) int { return min(1+c.bytes/ticketBytes, b.maxTickets()) }

// A builder makes token caches.
type builder struct {
	tokens *tokenizer.Tokenizer
	end    int32    // closes every document
	vocab  [32]byte // what the tokenizer is, see fingerprint
	dir    string
	events event.Sink
	limit  int      // bytes of a document
	base   cacheKey // of the source that was opened, without the chat template
	now    func() time.Time

	// template is the name that was asked for. It may be one that the tokenizer cannot write;
	// chatErr is then the reason, which matters where there are chats.
	template string
	chats    *chatter
	chatErr  error
	model    *chat.Template // the model's own; nil if it has none, or another one is asked for
	columns  chat.Columns
}

// newBuilder checks the options: the tokenizer must say which token ends a text, or End must.
func newBuilder(o *Options) (*builder, error) {
	if o.Tokenizer == nil {
		return nil, diag.New(diag.BadInput, "there is no tokenizer")
	}
	b := &builder{tokens: o.Tokenizer, dir: o.Cache, events: o.Events,
		limit: int(cmp.Or(o.Document, DefaultDocument)), now: o.now}
	if b.now == nil {
		b.now = time.Now
	}
	var ok bool
	if b.end, ok = o.Tokenizer.EOS(); o.End != "" {
		if b.end, ok = o.Tokenizer.ID(o.End); !ok {
			return nil, diag.New(diag.DataTokenizer, "the tokenizer has no token %q", o.End).
				Try("choose one of %s", strings.Join(specials(o.Tokenizer), ", "))
		}
	}
	if !ok {
		e := diag.New(diag.DataTokenizer, "the tokenizer does not say which token ends a text")
		if names := specials(o.Tokenizer); len(names) > 0 {
			return nil, e.Try("name the end token; the special ones are %s", strings.Join(names, ", "))
		}
		return nil, e.Try("put the model's tokenizer_config.json beside tokenizer.json")
	}
	b.vocab = fingerprint(b.tokens)
	if o.ModelDir != "" {
		b.model, b.chatErr = chat.FindTemplate(o.ModelDir)
	}
	return b, nil
}

// with gives a builder for the columns and the chat template of a source.
func (b builder) with(columns chat.Columns, template string) (*builder, error) {
	if err := columns.Check(); err != nil {
		return nil, err
	}
	b.columns, b.template = columns, template
	if template == "" && (b.model != nil || b.chatErr != nil) {
		return &b, nil
	}
	b.model, b.chatErr = nil, nil
	if template == Builtin {
		b.template = "" // as runs from before there were others have it
	}
	b.chats, b.chatErr = newChatter(b.template, b.tokens, b.end)
	if errors.Is(b.chatErr, diag.BadInput) { // there is no such template
		return nil, b.chatErr
	}
	return &b, nil
}

// specials lists the special tokens of a tokenizer, quoted.
func specials(t *tokenizer.Tokenizer) []string {
	var names []string
	for id := range int32(t.Size()) {
		if t.Special(id) {
			names = append(names, t.Token(id))
		}
	}
	return chat.Shown(names)
}

// probe is text in which tokenizers differ if their rules do: case, accents in both forms, digits,
// contractions, blanks, line ends, scripts, symbols, and bytes that are no text.
const probe = "Hello, World! it's WE'LL don't  two   three\tTab\r\n\r\n \n x=1234567890 3.14e-10 " +
	"é e\u0301 ﬁ ½ Å Ａ ß İ ſ Ǆ ไทย 日本語 한국어 \u1112\u1161\u11ab العربية हिन्दी " +
	"\U0001f469\u200d\U0001f680\U0001f3fd _snake_case camelCase http://a.b/c?d=e&f#g " +
	"</s><s>[INST]<|x|> \u00a0\u2003\u200b▁ \x00\x7f\u0085\ufeff \xff\xfe end "

// fingerprint tells tokenizers apart by what they do: the vocabulary, and how each of its tokens
// and the probe are spelled.
func fingerprint(t *tokenizer.Tokenizer) [32]byte {
	h := sha256.New()
	bos, _ := t.BOS()
	eos, _ := t.EOS()
	fmt.Fprintf(h, "%d %d %d\n", t.Size(), bos, eos)
	var ids []int32
	var buf []byte
	spell := func(text string, o tokenizer.Options) {
		ids = t.Append(ids[:0], text, o)
		buf = binary.LittleEndian.AppendUint32(buf[:0], uint32(len(ids)))
		for _, id := range ids {
			buf = binary.LittleEndian.AppendUint32(buf, uint32(id))
		}
		h.Write(buf)
	}
	for id := range int32(t.Size()) {
		fmt.Fprintf(h, "%q %t ", t.Token(id), t.Special(id))
		spell(t.Text([]int32{id}, tokenizer.Options{KeepSpecial: true}),
			tokenizer.Options{NoTemplate: true, Literal: true})
	}
	for _, text := range []string{"", " ", probe, strings.TrimSpace(probe), probe + probe} {
		spell(text, tokenizer.Options{})
		spell(text, tokenizer.Options{Literal: true})
	}
	return [32]byte(h.Sum(nil))
}

// key names the cache of a list of files whose sums are known.
func (b *builder) key(files []*file) cacheKey {
	base := b.baseKey(files)
	if b.model == nil {
		return base
	}
	return sha256.Sum256(fmt.Appendf(nil, "%x chat template %s\n", base, b.model.Digest))
}

// baseKey is the key but for the model's chat template, which texts do not depend on. The 1 is the
// version of what tokens are made of the files, not of the form of the cache: the digest of a run's
// data rests on it.
func (b *builder) baseKey(files []*file) cacheKey {
	h := sha256.New()
	fmt.Fprintf(h, "deepwell tokens 1\n%x\nend %d template %q\n", b.vocab, b.end, b.template)
	if len(b.columns) > 0 {
		fmt.Fprintf(h, "columns %s\n", b.columns)
	}
	for _, f := range files {
		fmt.Fprintf(h, "%q %s %d %x\n", f.name, f.format, f.size, f.sum)
	}
	return cacheKey(h.Sum(nil))
}

// open gives the cache of a source, and builds it if there is no intact one.
func (b *builder) open(ctx context.Context, s Source) (*cache, Stats, error) {
	stats := Stats{Name: s.Name}
	files, skipped, err := s.files()
	if err != nil {
		return nil, stats, err
	}
	stats.Files = int64(len(files))
	for _, f := range files {
		f.limit, f.split = b.limit, b.tokens.PieceEnd
	}
	if err := b.digest(ctx, s, files); err != nil {
		return nil, stats, stopped(ctx, err)
	}
	key := b.key(files)
	b.base = b.baseKey(files)
	dir := b.dir
	if dir == "" {
		if dir, err = os.MkdirTemp("", "deepwell-tokens-"); err != nil {
			return nil, stats, cacheError(os.TempDir(), err)
		}
		defer func() { _ = os.RemoveAll(dir) }() // what is mapped stays until it is unmapped
	}
	path := filepath.Join(dir, fmt.Sprintf("%x%s", key[:16], cacheSuffix))
	c, err := openCache(path, key)
	stats.Cached = err == nil
	if damage, ok := errors.AsType[errDamaged](err); ok {
		b.events.Emit(event.Warning{Code: string(diag.DataCache),
			Text: fmt.Sprintf("the token cache of %s is damaged (%s) and is made again", s.Name, damage)})
		err = fs.ErrNotExist
	}
	if errors.Is(err, fs.ErrNotExist) {
		if err := b.build(ctx, path, key, s.Name, files, skipped); err != nil {
			return nil, stats, stopped(ctx, err)
		}
		c, err = openCache(path, key)
	}
	if err != nil {
		return nil, stats, diag.New(diag.DataCache, "the token cache cannot be read").
			At("%s", path).Wrap(err).Try("set DEEPWELL_CACHE to a folder that you may read and write")
	}
	stats.Documents, stats.Tokens = c.documents, c.tokens
	if c.kinds&^(1<<chat.PlainText) != 0 {
		stats.Template = b.describe()
	}
	stats.Bytes, stats.Skipped, stats.Kinds = c.text, c.skipped, chat.Kinds(c.kinds)
	if c.skipped > 0 {
		stats.Passed = passedOver(path)
		text := fmt.Sprintf("%s: %d of %d files are not text and were passed over", s.Name, c.skipped,
			stats.Files+skipped)
		if len(stats.Passed) > 0 {
			text += ": " + strings.Join(stats.Passed, "; ")
		}
		b.events.Emit(event.Note{Text: text})
	}
	return c, stats, nil
}

// identity is what the digest of a run has of a source: texts do not depend on the chat template.
func (b *builder) identity(c *cache) cacheKey {
	if c.kinds == 1<<chat.PlainText {
		return b.base
	}
	return c.key
}

// describe says how chats are written.
func (b *builder) describe() string {
	switch {
	case b.model == nil && b.chats != nil:
		return b.chats.name + ", built in"
	case b.model == nil:
		return ""
	case b.model.Marks():
		return filepath.Base(b.model.Path) + ", loss where it marks generation"
	}
	return filepath.Base(b.model.Path) + ", loss on what each answer adds"
}

// digest fills in the sums of a source's files. It reads those that changed since the last time, so
// that starting again does not take longer the more data there is.
func (b *builder) digest(ctx context.Context, s Source, files []*file) error {
	task := "read " + s.Name
	root, err := filepath.Abs(s.Path)
	if b.dir == "" || err != nil {
		return digest(ctx, task, files, b.events, b.now)
	}
	name := sha256.Sum256([]byte(root))
	path := filepath.Join(b.dir, fmt.Sprintf("%x%s", name[:16], sumsSuffix))
	known := readSums(path)
	unread := lists.Filter(files, func(f *file) bool { return !f.recall(known) })
	if len(unread) == 0 {
		return nil
	}
	if err := digest(ctx, task, unread, b.events, b.now); err != nil {
		return err
	}
	writeSums(path, files)
	return nil
}

// stopped tells an error of the caller's context from others.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return diag.New(diag.Canceled, "stopped while reading the data").Wrap(ctx.Err())
	}
	return err
}

// build writes a cache file.
func (b *builder) build(ctx context.Context, path string, key cacheKey, name string,
	files []*file, skipped int64) error {
	width := 4
	if b.tokens.Size() <= 1<<16 {
		width = 2
	}
	total := lists.Sum(files, func(f *file) int64 { return f.size })
	var passed []string
	err := writeCache(path, width, key, func(w *cacheWriter) error {
		err := b.each(ctx, files, func(c *chunk) error {
			w.text += c.text
			w.skipped += c.skipped
			w.kinds |= c.kinds
			passed = append(passed, c.passed...)
			b.events.Emit(event.Progress{Task: "tokenize " + name, Done: c.read, Total: total, Unit: "B"})
			return c.documents(w)
		})
		if err != nil {
			return err
		}
		w.skipped += skipped
		return unchanged(files)
	})
	if err == nil && len(passed) > 0 {
		// The tokens are what counts: without this file, skipped files are counted and not named.
		_ = atomicfile.Write(path+passedSuffix, []byte(strings.Join(passed[:min(len(passed),
			maxPassed)], "\n")), 0o644)
	}
	return err
}

// maxPassed is how many skipped files are named; the file with their names is beside the cache.
const (
	maxPassed    = 8
	passedSuffix = ".passed"
)

// passedOver names files that were skipped when a cache was made, if that is known.
func passedOver(path string) []string {
	text, err := safedir.ReadPlain(path+passedSuffix, 1<<16)
	if err != nil {
		return nil
	}
	return strings.Split(string(text), "\n")
}

// A chunk is some documents on their way: first as items, then as tokens.
type chunk struct {
	items   []item
	skipped int64
	passed  []string // the first of the skipped files, with the reason
	bytes   int
	read    int64 // bytes of all files that were read up to here
	err     error // of reading, behind the items

	ready   chan struct{} // closed when what follows is known
	text    int64
	kinds   uint64 // of its rows: bit k is set for [chat.Kind] k
	tokens  []int32
	ends    []int    // where documents end in tokens
	hashes  []uint64 // of their contents
	learned []bool   // nil if all tokens are
}

// documents writes the documents of a chunk.
func (c *chunk) documents(w *cacheWriter) error {
	from := 0
	for i, end := range c.ends {
		if err := c.add(w, from, end); err != nil {
			return err
		}
		if err := w.end(c.hashes[i]); err != nil {
			return err
		}
		from = end
	}
	if err := c.add(w, from, len(c.tokens)); err != nil { // of a document that goes on
		return err
	}
	return c.err
}

// add appends a range of the chunk's tokens to the cache as one document.
func (c *chunk) add(w *cacheWriter, from, to int) error {
	if c.learned == nil {
		return w.add(c.tokens[from:to], nil)
	}
	return w.add(c.tokens[from:to], c.learned[from:to])
}

// each reads and tokenizes files, and hands on the chunks in the order of the documents. There are
// tickets for a few chunks to be on their way, so that memory does not grow with the data.
func (b *builder) each(ctx context.Context, files []*file, take func(*chunk) error) error {
	ctx, cancel := context.WithCancel(ctx)
	workers := runtime.GOMAXPROCS(0)
	work := make(chan *chunk)
	tickets := make(chan struct{}, max(2*workers, b.maxTickets()))
	line := make(chan *chunk, cap(tickets)) // chunks in their order, ready or not
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer close(work)
		defer close(line)
		readAll(ctx, files, func(c *chunk) error {
			for range b.tickets(c) {
				select {
				case tickets <- struct{}{}:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			for _, ch := range []chan *chunk{line, work} {
				select {
				case ch <- c:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		})
	})
	for range workers {
		wg.Go(func() {
			for c := range work {
				b.encode(c)
				close(c.ready)
			}
		})
	}
	for c := range line {
		select {
		case <-c.ready:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := take(c); err != nil {
			return err
		}
		for range b.tickets(c) {
			<-tickets
		}
	}
	return ctx.Err()
}

// readAll reads files one after the other and puts their documents into chunks. An error is put
// into the last chunk.
func readAll(ctx context.Context, files []*file, put func(*chunk) error) {
	before := int64(0) // bytes of the files that were read
	c := &chunk{ready: make(chan struct{})}
	send := func() error {
		full := c
		c = &chunk{ready: make(chan struct{}), read: full.read}
		return put(full)
	}
	for _, f := range files {
		err := readers[f.format](ctx, f, func(it item) error {
			c.items = append(c.items, it)
			c.bytes += it.size()
			c.read = before + min(it.read, f.size)
			if c.bytes < chunkBytes {
				return nil
			}
			return send()
		})
		before += f.size
		c.read = before
		if why, ok := errors.AsType[errNoText](err); ok {
			if c.skipped++; len(c.passed) < maxPassed {
				c.passed = append(c.passed, f.name+": "+why.why)
			}
			continue
		}
		if err != nil {
			c.err = err
			break
		}
	}
	_ = send() // the context ended, and the one who waits for the chunk knows
}

// encode makes tokens of the items of a chunk. The first error ends the chunk.
func (b *builder) encode(c *chunk) {
	failed := false
	for i := range c.items {
		it := &c.items[i]
		if !failed {
			if err := b.document(c, it); err != nil {
				c.err, failed = err, true
			}
		}
		if it.long != nil {
			close(it.long.done) // the worker of the next chunk waits for this, error or not
		}
	}
	c.items = nil
}

// document tokenizes one text or chat into the chunk.
func (b *builder) document(c *chunk, it *item) error {
	if err := it.parse(b.columns); err != nil {
		return err
	}
	from := len(c.tokens)
	if it.chat != nil || it.prompt > 0 {
		c.mask()
	}
	switch {
	case it.long != nil:
		if !b.chunkOf(c, it) {
			return nil
		}
	case it.chat != nil:
		if b.chatErr != nil {
			return diag.From(b.chatErr).At("%s", it.where)
		}
		if b.model != nil {
			if err := b.converse(c, it); err != nil {
				return diag.From(err).At("%s", it.where)
			}
		} else if err := b.chats.check(it); err != nil {
			return err
		} else {
			c.tokens, c.learned = b.chats.append(c.tokens, c.learned, it.chat)
		}
		c.text += int64(chat.Spoken(it.chat))
	case it.ids != nil:
		for _, id := range it.ids {
			if id < 0 || int(id) >= b.tokens.Size() {
				return diag.New(diag.DataTokenizer, "token %d is not one of the tokenizer's %d", id,
					b.tokens.Size()).At("%s", it.where).
					Try("name the tokenizer that the file was made with")
			}
		}
		c.tokens = append(c.tokens, it.ids...)
	case it.prompt > 0:
		b.completion(c, it)
	case it.text != "":
		c.tokens = b.tokens.Append(c.tokens, it.text, tokenizer.Options{Literal: true})
		c.text += int64(len(it.text))
	}
	if len(c.tokens) == from && it.long == nil {
		return nil
	}
	var last int32
	if it.long != nil {
		last = it.long.last // perhaps of the chunk before
	} else {
		last = c.tokens[len(c.tokens)-1]
	}
	if last != b.end {
		c.tokens = append(c.tokens, b.end)
	}
	if c.learned != nil {
		// The token that joins chats was said by nobody; one that joins texts is learned.
		for len(c.learned) < len(c.tokens) {
			c.learned = append(c.learned, it.chat == nil)
		}
	}
	c.ends = append(c.ends, len(c.tokens))
	c.hashes = append(c.hashes, it.hash())
	if it.ids == nil {
		c.kinds |= 1 << it.kind
	}
	return nil
}

// mask gives the chunk flags of what is learned; so far, all is.
func (c *chunk) mask() {
	if c.learned == nil {
		c.learned = slices.Repeat([]bool{true}, len(c.tokens))
	}
}

// completion tokenizes a prompt, which is given, and what follows it. The two are encoded apart,
// because the model is given the tokens of the prompt alone when it is asked to go on.
func (b *builder) completion(c *chunk, it *item) {
	start, part := len(c.tokens), tokenizer.Part{More: true}
	o := tokenizer.Options{Literal: true, Part: &part}
	c.tokens = b.tokens.Append(c.tokens, it.text[:it.prompt], o)
	c.learned = append(c.learned, make([]bool, len(c.tokens)-start)...)
	part.More = false
	c.tokens = b.tokens.Append(c.tokens, it.text[it.prompt:], o)
	c.text += int64(len(it.text))
	for len(c.learned) < len(c.tokens) {
		c.learned = append(c.learned, true)
	}
}

// chunkOf tokenizes one chunk of a long text, and reports whether they end a document.
func (b *builder) chunkOf(c *chunk, it *item) (ends bool) {
	l := it.long
	if l.turn != nil {
		<-l.turn
	}
	from := len(c.tokens)
	l.part.More = l.more
	c.tokens = b.tokens.Append(c.tokens, it.text, tokenizer.Options{Literal: true, Part: &l.part})
	c.text += int64(len(it.text))
	if len(c.tokens) > from {
		l.any, l.last = true, c.tokens[len(c.tokens)-1]
	}
	if c.learned != nil {
		c.learned = append(c.learned, slices.Repeat([]bool{true}, len(c.tokens)-from)...)
	}
	_, _ = io.WriteString(l.hash, it.text) // a hash takes all
	return !l.more && l.any
}
