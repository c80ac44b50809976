package data

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/tokenizer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// special are the tokens of the test's tokenizer: of both chat templates. The first of them
// ends a text.
var special = []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>",
	"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}

// newTokenizer learns a small byte-level BPE.
func newTokenizer(t testing.TB, special ...string) *tokenizer.Tokenizer {
	t.Helper()
	text := strings.Repeat("the quick brown fox jumps over the lazy dog. user assistant system\n\n", 40)
	file, err := tokenizer.Train(slices.Values([]string{text}), 300, special...)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Parse(file)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// write makes files below a new folder.
func write(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// open opens a loader that the test closes.
func open(t testing.TB, o Options) *Loader {
	t.Helper()
	l, err := tryOpen(t, o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func tryOpen(t testing.TB, o Options) (*Loader, error) {
	t.Helper()
	if o.Tokenizer == nil {
		o.Tokenizer = newTokenizer(t, "<|endoftext|>")
	}
	if o.Seq == 0 {
		o.Seq = 16
	}
	l, err := Open(t.Context(), o)
	if err == nil {
		t.Cleanup(func() { l.Close() })
	}
	return l, err
}

// lines gives what a person would see.
func lines(r *event.Recorder) string {
	var b strings.Builder
	for _, e := range r.Events() {
		if line := e.Line(); line != "" {
			fmt.Fprintln(&b, line)
		}
	}
	return b.String()
}

// words makes a text of n words.
func words(r *rand.Rand, n int) string {
	list := []string{"the", "quick", "brown", "fox", "jumps", "über", "lazy", "dog.\n", "42", "naïve"}
	var b strings.Builder
	for range n {
		b.WriteString(list[r.IntN(len(list))])
		b.WriteByte(' ')
	}
	return b.String()
}

func TestRowsAreWhatTheDocumentSays(t *testing.T) {
	tok := newTokenizer(t, "<|endoftext|>")
	dir := write(t, map[string]string{"a.txt": "the quick fox", "b.txt": "", "c.txt": "lazy dog the fox <|endoftext|>"})
	var stream []int32
	var starts []int
	for _, text := range []string{"the quick fox", "lazy dog the fox <|endoftext|>"} {
		starts = append(starts, len(stream))
		stream = tok.Append(stream, text, tokenizer.Options{Literal: true})
		stream = append(stream, 0)
	}
	const seq = 4
	l := open(t, Options{Sources: []Source{{Path: dir}}, Tokenizer: tok, Seq: seq})
	if got, want := l.Sequences(), int64((len(stream)-1)/seq); got != want || l.Tokens() != int64(len(stream)) {
		t.Fatalf("%d rows of %d tokens, want %d of %d", got, l.Tokens(), want, len(stream))
	}
	for row := range int(l.Sequences()) {
		b, err := l.Row("data", int64(row))
		if err != nil {
			t.Fatal(err)
		}
		want := &Batch{Sequences: 1, Seq: seq}
		segment, position := int32(0), int32(0)
		for i := row * seq; i < row*seq+seq; i++ {
			if slices.Contains(starts, i) && i > row*seq {
				segment, position = segment+1, 0
			}
			label := stream[i+1]
			if slices.Contains(starts, i+1) {
				label = Ignored
			} else {
				want.Count++
			}
			want.IDs = append(want.IDs, stream[i])
			want.Labels = append(want.Labels, label)
			want.Positions = append(want.Positions, position)
			want.Segments = append(want.Segments, segment)
			position++
		}
		want.Total = want.Count
		if diff := cmp.Diff(want, b); diff != "" {
			t.Errorf("row %d: %s", row, diff)
		}
	}
}

func TestJoinedRowsAreOneText(t *testing.T) {
	dir := write(t, map[string]string{"a": "the fox", "b": "the dog", "c": "the lazy dog"})
	l := open(t, Options{Sources: []Source{{Path: dir}}, Seq: 8, Joined: true})
	b, err := l.Row("data", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.IDs {
		if i > 0 && b.Labels[i-1] != b.IDs[i] || b.Positions[i] != int32(i) || b.Segments[i] != 0 {
			t.Fatalf("token %d: %+v", i, b)
		}
	}
	if b.Count != 8 || b.Total != 8 {
		t.Errorf("%d of %d labels count", b.Count, b.Total)
	}
}

// mixture is three sources of different sizes.
func mixture(t testing.TB, seq int, shuffle bool) *Loader {
	r := rand.New(rand.NewPCG(1, 2))
	files := map[string]string{}
	for i := range 30 {
		files[fmt.Sprintf("%c/%02d.txt", 'a'+i%3, i)] = words(r, 20+200*(i%3))
	}
	dir := write(t, files)
	return open(t, Options{Seq: seq, Seed: 7, Shuffle: shuffle, Sources: []Source{
		{Name: "c", Path: filepath.Join(dir, "c"), Weight: 0.2},
		{Name: "a", Path: filepath.Join(dir, "a"), Weight: 0.7},
		{Name: "b", Path: filepath.Join(dir, "b"), Weight: 0.1},
	}})
}

func TestRanksShareTheRowsOfOne(t *testing.T) {
	loaders := []*Loader{mixture(t, 16, true), open(t, Options{Shuffle: true, HoldoutShare: 0.2,
		Sources: []Source{{Name: "a", Path: write(t, corpusOf(40))}, {Name: "b", Path: write(t, corpusOf(90))}}})}
	rapid.Check(t, func(t *rapid.T) {
		l := rapid.SampledFrom(loaders).Draw(t, "loader")
		ranks := rapid.IntRange(1, 8).Draw(t, "ranks")
		rows := rapid.IntRange(ranks, 40).Draw(t, "rows")
		at := Position{"a": rapid.Int64Range(0, 500).Draw(t, "a"), "b": rapid.Int64Range(0, 500).Draw(t, "b")}
		whole, after, err := l.Take(t.Context(), at, rows, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		union := &Batch{Seq: 16, Total: whole.Total}
		for rank := range ranks {
			b, next, err := l.Take(t.Context(), at, rows, rank, ranks)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(after, next); diff != "" || b.Total != whole.Total {
				t.Fatalf("rank %d is elsewhere: %s", rank, diff)
			}
			union.IDs = append(union.IDs, b.IDs...)
			union.Labels = append(union.Labels, b.Labels...)
			union.Positions = append(union.Positions, b.Positions...)
			union.Segments = append(union.Segments, b.Segments...)
			union.Sequences += b.Sequences
			union.Count += b.Count
		}
		if diff := cmp.Diff(whole, union); diff != "" {
			t.Fatal(diff)
		}
		counted := int64(0)
		for _, label := range whole.Labels {
			if label != Ignored {
				counted++
			}
		}
		if counted != whole.Count || counted != whole.Total {
			t.Fatalf("%d labels count; the batch says %d and %d", counted, whole.Count, whole.Total)
		}
	})
}

func TestResumeGivesTheSameBatches(t *testing.T) {
	first, second := mixture(t, 16, true), mixture(t, 16, true)
	if first.Digest() != second.Digest() {
		t.Error("the same data has two digests")
	}
	at, saved := Position(nil), []Position{nil}
	var batches []*Batch
	for step := range 40 {
		b, after, err := first.Take(t.Context(), at, 5+step%3, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		batches, saved, at = append(batches, b), append(saved, after), after
	}
	for step := range batches {
		b, after, err := second.Take(t.Context(), saved[step], 5+step%3, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(batches[step], b); diff != "" {
			t.Fatalf("step %d: %s", step, diff)
		}
		if diff := cmp.Diff(saved[step+1], after); diff != "" {
			t.Fatalf("step %d: %s", step, diff)
		}
	}
}

// An epoch visits each row once; the next one in another order; and file order is just that.
func TestEpochVisitsEachRowOnce(t *testing.T) {
	dir := write(t, corpusOf(30))
	for i := range 4 {
		shuffle := i%2 == 1
		l := open(t, Options{Sources: []Source{{Path: dir}}, Seq: 8, Shuffle: shuffle, Seed: 1,
			HoldoutShare: float64(i/2) * 0.3})
		n := int(l.Sequences())
		want := map[string]int{}
		var inOrder, before []string
		for row := range n {
			b, err := l.Row("data", int64(row))
			if err != nil {
				t.Fatal(err)
			}
			want[fmt.Sprint(b.IDs, b.Labels)]++
			inOrder = append(inOrder, fmt.Sprint(b.IDs, b.Labels))
		}
		at := Position(nil)
		for epoch := range 3 {
			b, after, err := l.Take(t.Context(), at, n, 0, 1)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]int{}
			var order []string
			for row := range n {
				key := fmt.Sprint(b.IDs[row*8:row*8+8], b.Labels[row*8:row*8+8])
				got[key]++
				order = append(order, key)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("shuffle %t, epoch %d: %s", shuffle, epoch, diff)
			}
			if slices.Equal(order, inOrder) == shuffle || shuffle && slices.Equal(order, before) {
				t.Errorf("shuffle %t, epoch %d: the order is not another one", shuffle, epoch)
			}
			at, before = after, order
		}
		if at["data"] != int64(3*n) {
			t.Errorf("the position is %v after %d rows", at, 3*n)
		}
	}
}

// corpusOf gives files of n documents whose first word is their own.
func corpusOf(n int) map[string]string {
	files := map[string]string{}
	for i := range n {
		files[fmt.Sprintf("%03d", i)] = fmt.Sprint(i, " ", words(rand.New(rand.NewPCG(3, uint64(i))), 20+i%40))
	}
	return files
}

// taken gives the documents that rows have tokens of, as text.
func taken(t *testing.T, l *Loader, b *Batch) string {
	t.Helper()
	return l.options.Tokenizer.Text(b.IDs, tokenizer.Options{KeepSpecial: true})
}

// The number of documents is the most that any sequence has, trained on or held out.
func TestDocumentsOfTheFullestSequence(t *testing.T) {
	dir := write(t, corpusOf(200))
	for _, o := range []Options{{}, {HoldoutShare: 0.3}, {Joined: true}} {
		o.Sources = []Source{{Path: dir}}
		for _, seq := range []int{8, 32, 100} {
			o.Seq = seq
			l := open(t, o)
			trained, _, err := l.Take(t.Context(), nil, int(l.Sequences()), 0, 1)
			if err != nil {
				t.Fatal(err)
			}
			held, err := l.Eval(t.Context(), 0, int(max(1, l.EvalSequences())), 0, 1)
			if err != nil {
				t.Fatal(err)
			}
			most := int64(max(slices.Max(trained.Segments), slices.Max(held.Segments)) + 1)
			if got := l.Documents(); got != most {
				t.Errorf("%+v: %d documents, and a sequence has %d", o, got, most)
			}
		}
	}
}

// A document is trained on or held out, all of it: no row of one side has a token of the other.
// This is finding A21: the last rows were held out, which split a document.
func TestHeldOutDocumentsAreWhole(t *testing.T) {
	files := corpusOf(200)
	dir := write(t, files)
	for _, o := range []Options{{HoldoutSequences: 7}, {HoldoutShare: 0.05}, {HoldoutShare: 0.5}, {HoldoutShare: 1e-9}} {
		o.Sources, o.Seq, o.Shuffle = []Source{{Path: dir}}, 8, false
		l := open(t, o)
		stats := l.Stats()[0]
		if stats.HeldOut < max(1, o.HoldoutSequences) || l.EvalSequences() != stats.HeldOut {
			t.Fatalf("%d rows, %d held out, %d to evaluate", l.Sequences(), stats.HeldOut, l.EvalSequences())
		}
		b, err := l.Eval(t.Context(), 0, int(stats.HeldOut)+2, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if tail := b.Labels[stats.HeldOut*8:]; slices.Max(tail) != Ignored || b.Count > stats.HeldOut*8 {
			t.Errorf("rows behind the last one count: %v, %d labels", tail, b.Count)
		}
		if tail := b.IDs[stats.HeldOut*8:]; !slices.Equal(tail[:8], b.IDs[:8]) { // not all one token
			t.Errorf("the row behind the last one is %v, the first %v", tail[:8], b.IDs[:8])
		}
		held := taken(t, l, b)
		b, _, err = l.Take(t.Context(), nil, int(l.Sequences()), 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		trained := taken(t, l, b)
		count := 0
		for name, text := range files {
			in, out := strings.Contains(trained, text), strings.Contains(held, text)
			if in && out {
				t.Errorf("%g, %d rows: document %s is on both sides", o.HoldoutShare, o.HoldoutSequences, name)
			}
			if out {
				count++
			}
			// What does not fill a row is left over, at the end of either side.
			head, tail := text[:30], text[len(text)-70:]
			if strings.Contains(trained, head) && strings.Contains(held, tail) ||
				strings.Contains(held, head) && strings.Contains(trained, tail) {
				t.Errorf("%g, %d rows: document %s was split", o.HoldoutShare, o.HoldoutSequences, name)
			}
		}
		if want := o.HoldoutShare * 200; want >= 10 && (float64(count) < want/2 || float64(count) > want*1.5) {
			t.Errorf("%d of 200 documents are held out, not some %g", count, want)
		}
	}
	_, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Seq: 8, HoldoutSequences: 1 << 20})
	if !errors.Is(err, diag.DataEmpty) {
		t.Errorf("all rows held out: %v", err)
	}
}

// heldTexts gives the texts of the documents that are held out.
func heldTexts(l *Loader) []string {
	var list []string
	for _, s := range l.sources {
		for i, r := range s.heldOut.runs {
			for d := r.document; s.start(d) < s.heldOut.end(i); d++ {
				var ids []int32
				for at := s.start(d); at < s.start(d+1); at++ {
					ids = append(ids, s.token(at))
				}
				list = append(list, l.options.Tokenizer.Text(ids, tokenizer.Options{}))
			}
		}
	}
	slices.Sort(list)
	return list
}

// Which documents are held out rests on their contents alone: not on names, order, format, other
// documents or the tokenizer. Copies of a document are on the same side.
func TestHeldOutDocumentsAreChosenByContents(t *testing.T) {
	files := corpusOf(100)
	o := Options{Sources: []Source{{Path: write(t, files)}}, Seq: 8, HoldoutShare: 0.2}
	want := heldTexts(open(t, o))
	if len(want) < 8 {
		t.Fatalf("%d of 100 documents are held out", len(want))
	}
	var lines []string
	for name, text := range files { // in any order
		line, _ := json.Marshal(map[string]string{"text": text, "name": name})
		lines = append(lines, string(line))
	}
	o.Sources = []Source{{Path: filepath.Join(write(t, map[string]string{"other.jsonl": strings.Join(lines, "\n")}), "other.jsonl")}}
	if got := heldTexts(open(t, o)); !slices.Equal(got, want) {
		t.Errorf("as jsonl other documents are held out: %d, not %d", len(got), len(want))
	}
	twice := corpusOf(130)
	for name, text := range files {
		twice["copy"+name] = text
	}
	o.Sources = []Source{{Path: write(t, twice)}}
	more := heldTexts(open(t, o))
	for _, text := range want {
		if n := len(slices.DeleteFunc(slices.Clone(more), func(s string) bool { return s != text })); n != 2 {
			t.Errorf("of a document that is there twice %d are held out", n)
		}
	}
}

func TestDataOfOneDocumentCannotBeHeldOut(t *testing.T) {
	dir := write(t, map[string]string{"x": words(rand.New(rand.NewPCG(3, 4)), 900)})
	one, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Seq: 8, HoldoutShare: 0.01})
	if err != nil {
		t.Fatal(err)
	}
	err = one.Ready()
	if _, _, again := one.Take(t.Context(), Position{}, 1, 0, 1); again == nil {
		t.Error("rows of it are taken all the same")
	}
	// A run that was begun with the first split goes on: its digest is the one of the rows.
	if !one.Adopt(one.Digest()) || one.Ready() != nil {
		t.Error("an old run of one document cannot go on")
	}
	if _, _, err := one.Take(t.Context(), Position{}, 1, 0, 1); err != nil {
		t.Errorf("after an old split was adopted: %v", err)
	}
	if !errors.Is(err, diag.DataEmpty) || !strings.Contains(diag.From(err).Fix, "eval.data") {
		t.Errorf("one document: %v", err)
	}
	r := &event.Recorder{}
	dir = write(t, map[string]string{"x": words(rand.New(rand.NewPCG(3, 4)), 900), "y": words(rand.New(rand.NewPCG(3, 5)), 900)})
	l := open(t, Options{Sources: []Source{{Path: dir}}, Seq: 8, HoldoutShare: 0.01, Events: r})
	if err := l.Ready(); err != nil {
		t.Fatal(err)
	}
	if out := lines(r); !strings.Contains(out, "are held out, not 1%") {
		t.Errorf("%d of %d rows are held out, and all that is said is %q", l.EvalSequences(), l.Sequences(), out)
	}
}

// A run that was begun when the last rows were held out goes on with them.
func TestOldSplitIsAdopted(t *testing.T) {
	o := Options{Sources: []Source{{Path: write(t, corpusOf(60))}}, Seq: 8, HoldoutShare: 0.05, Seed: 7, Shuffle: true}
	l := open(t, o)
	now, rows := l.Digest(), l.Sequences()
	// What the commit 3c16e73 prints for this data.
	const old = "c75ba499d0c6917e1ea60a5153572541de91e856c71ae1f00ea2648a09d49805"
	if l.Adopt("0123") || l.Digest() != now || l.Sequences() != rows {
		t.Fatal("a digest of no data is adopted")
	}
	if !l.Adopt(now) || l.Digest() != now {
		t.Fatal("its own digest is not adopted")
	}
	if !l.Adopt(old) || l.Digest() != old {
		t.Fatalf("the digest of the old split is not adopted")
	}
	b, after, err := l.Take(t.Context(), nil, 3, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if l.Sequences() != 770 || l.EvalSequences() != 41 || after["data"] != 3 {
		t.Errorf("%d rows, %d to evaluate", l.Sequences(), l.EvalSequences())
	}
	if !slices.Equal(b.IDs[:8], []int32{14, 199, 221, 78, 65, 128, 108, 86}) {
		t.Errorf("the first row is %v", b.IDs[:8])
	}
	held, err := l.Eval(t.Context(), 0, 1, 0, 1)
	if err != nil || !slices.Equal(held.IDs, []int32{71, 14, 199, 290, 270, 287, 295, 286}) {
		t.Errorf("the first row to evaluate is %v, %v", held.IDs, err)
	}
	whole := o
	whole.HoldoutShare = 0
	if l := open(t, whole); l.Adopt(old) || !l.Adopt(l.Digest()) {
		t.Error("data without a holdout adopts a split")
	}
}

func TestSourcesAreOpenedInAnyOrder(t *testing.T) {
	dir := write(t, map[string]string{"a": words(rand.New(rand.NewPCG(1, 1)), 90), "b": words(rand.New(rand.NewPCG(1, 2)), 190)})
	a, b := Source{Path: filepath.Join(dir, "a")}, Source{Path: filepath.Join(dir, "b")}
	one := open(t, Options{Sources: []Source{a, b}})
	two := open(t, Options{Sources: []Source{b, a}})
	if one.Digest() != two.Digest() {
		t.Error("the order of the sources matters")
	}
	// Without weights every row of both is seen once in an epoch, to within a row.
	_, after, err := one.Take(t.Context(), nil, int(one.Sequences()), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range one.Stats() {
		if d := after[s.Name] - s.Sequences; d < -1 || d > 1 {
			t.Errorf("%s: %d of %d rows", s.Name, after[s.Name], s.Sequences)
		}
	}
}

func TestErrorsHelp(t *testing.T) {
	dir := write(t, map[string]string{"corpus.txt": "the fox", "bin.txt": "\xff\xfe\x00", "big.txt": strings.Repeat("the fox ", 99),
		"dir/empty.txt": ""})
	in := func(name string) []Source { return []Source{{Path: filepath.Join(dir, name)}} }
	plain := newTokenizer(t)
	tests := []struct {
		name string
		o    Options
		code diag.Code
		want string
	}{
		{"slip", Options{Sources: in("corpus.tx")}, diag.DataMissing, "did you mean"},
		{"no match", Options{Sources: in("**/*.md")}, diag.DataMissing, "nothing matches"},
		{"short", Options{Sources: in("corpus.txt"), Seq: 512}, diag.DataEmpty, "a sequence of 512 needs 513"},
		{"binary", Options{Sources: in("bin.txt")}, diag.DataEmpty, "no text was found"},
		{"empty", Options{Sources: in("dir")}, diag.DataEmpty, "no text was found"},
		{"no sources", Options{}, diag.BadInput, "no source"},
		{"no path", Options{Sources: []Source{{}}}, diag.BadInput, "no path"},
		{"format", Options{Sources: []Source{{Path: dir, Format: "xlsx"}}}, diag.BadInput, `no format "xlsx"`},
		{"seq", Options{Sources: in("big.txt"), Seq: -1}, diag.BadInput, "-1 tokens"},
		{"twice", Options{Sources: append(in("big.txt"), in("big.txt")...)}, diag.BadInput, "two sources"},
		{"no end", Options{Sources: in("big.txt"), Tokenizer: plain}, diag.DataTokenizer, "which token ends a text"},
		{"end", Options{Sources: in("big.txt"), End: "</s>"}, diag.DataTokenizer, `no token "</s>"`},
		{"template", Options{Sources: in("big.txt"), Template: "chatlm"}, diag.BadInput, "did you mean chatml"},
		{"holdout", Options{Sources: in("big.txt"), HoldoutShare: 1}, diag.BadInput, "held out"},
		{"weights", Options{Sources: []Source{{Name: "a", Path: dir, Weight: 1}, {Name: "b", Path: dir}}},
			diag.BadInput, "not a weight"},
		{"megatron", Options{Sources: []Source{{Path: filepath.Join(dir, "big.txt"), Format: Megatron}}},
			diag.DataMissing, "other half"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := tryOpen(t, tt.o)
			if err == nil || !errors.Is(err, tt.code) || !strings.Contains(diag.From(err).Format(), tt.want) {
				t.Errorf("got %v; want %s with %q", err, tt.code, tt.want)
			}
		})
	}
}

func TestTakeRefusesWhatCannotBe(t *testing.T) {
	l := mixture(t, 16, false)
	for _, tt := range []struct {
		at                Position
		rows, rank, ranks int
		code              diag.Code
	}{
		{Position{"d": 3}, 4, 0, 1, diag.DataPosition},
		{Position{"a": -1}, 4, 0, 1, diag.DataPosition},
		{Position{"a": 1 << 60}, 4, 0, 1, diag.DataPosition},
		{nil, 4, 1, 1, diag.BadInput},
		{nil, 4, 0, 0, diag.BadInput},
		{nil, 3, 0, 4, diag.BadInput},
		{nil, 0, 0, 1, diag.BadInput},
	} {
		_, _, err := l.Take(t.Context(), tt.at, tt.rows, tt.rank, tt.ranks)
		if !errors.Is(err, tt.code) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
	if _, err := l.Row("a", l.Sequences()+1); err == nil {
		t.Error("a row behind the last")
	}
	if _, err := l.Row("x", 0); err == nil {
		t.Error("a row of no source")
	}
	l.Close()
	if _, _, err := l.Take(t.Context(), nil, 4, 0, 1); err == nil {
		t.Error("a row of a closed loader")
	}
	if b, err := l.Eval(t.Context(), 0, 1, 0, 1); err != nil || b.Count != 0 || l.EvalSequences() != 0 {
		t.Error("a closed loader has rows to evaluate")
	}
}

func TestStopsWithTheContext(t *testing.T) {
	dir := write(t, map[string]string{"x": strings.Repeat("the fox ", 1000)})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Open(ctx, Options{Sources: []Source{{Path: dir}}, Tokenizer: newTokenizer(t, "<|endoftext|>"), Seq: 8})
	if !errors.Is(err, diag.Canceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A document that is in several sources is on one side in all of them, though sources of few
// documents hold out a larger share of them.
func TestDocumentsInSeveralSourcesAreOnOneSide(t *testing.T) {
	for trial := range uint64(20) {
		r := rand.New(rand.NewPCG(7, trial))
		small, large := map[string]string{}, map[string]string{}
		for i := range 60 {
			text := words(r, 40)
			if large[fmt.Sprint(i)] = text; i < 5 {
				small[fmt.Sprint(i)] = text
			}
		}
		alone := words(r, 60)
		large["alone"] = alone
		l := open(t, Options{Seq: 8, HoldoutShare: 0.02, Sources: []Source{{Name: "a", Path: write(t, small)},
			{Name: "b", Path: write(t, large)}, {Name: "c", Path: write(t, map[string]string{"x": alone})}}})
		held, trained := map[uint64]bool{}, map[uint64]bool{}
		for _, s := range l.sources {
			for _, h := range hashesOf(s, &s.heldOut) {
				held[h] = true
			}
			for _, h := range hashesOf(s, &s.train) {
				trained[h] = true
			}
		}
		if len(held) == 0 || len(held)+len(trained) < 61 {
			t.Fatalf("trial %d: %d documents are held out, %d trained on", trial, len(held), len(trained))
		}
		for h := range held {
			if trained[h] {
				t.Fatalf("trial %d: a document is trained on and held out", trial)
			}
		}
	}
}

// hashesOf lists the hashes of the documents that a stream has.
func hashesOf(s *source, from *stream) (list []uint64) {
	for i, r := range from.runs {
		end := from.length
		if i+1 < len(from.runs) {
			end = from.runs[i+1].at
		}
		for d := r.document; d < s.documents && s.start(d) < r.token+end-r.at; d++ {
			list = append(list, s.hash(d))
		}
	}
	return list
}
