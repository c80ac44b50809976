package data

import (
	"context"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// Ignored is the label of a token from which nothing is learned.
const Ignored = -1

// A Batch is some sequences of Seq tokens, one after the other: every slice is [Sequences, Seq],
// row-major. Who takes a batch may change it: the loader does not keep it.
type Batch struct {
	IDs            []int32 // from 0, below the model's vocabulary; the trainer refuses others
	Labels         []int32 // the next token, or Ignored where nothing is learned
	Positions      []int32 // in the document, from 0 at its first token in the sequence
	Segments       []int32 // document numbers within the sequence; attention does not cross them
	Sequences, Seq int
	// Count is the number of labels of these sequences that are not Ignored, and Total the number in
	// the sequences of all ranks, where a Loader gives each rank a part. The trainer, which reads
	// whole batches, counts them itself.
	Count, Total int64
}

// newBatch allocates a batch; the four arrays share one allocation.
func newBatch(rows, seq int) *Batch {
	all := make([]int32, 4*rows*seq)
	b := &Batch{Sequences: rows, Seq: seq}
	for i, part := range []*[]int32{&b.IDs, &b.Labels, &b.Positions, &b.Segments} {
		*part = all[i*rows*seq : (i+1)*rows*seq : (i+1)*rows*seq]
	}
	return b
}

// NewBatch builds a batch from token ids: each sequence is one document of S+1 tokens, of which the
// first S are the inputs and the last S the labels. All sequences have the same length.
// The last token of a sequence may be [Ignored]: then nothing is learned from its label.
//
// For several documents in one sequence, fill a Batch by hand: Segments number the documents and
// Positions count from the beginning of each. Labels may be set to Ignored later, as to mask
// prompts. The trainer counts the labels itself.
func NewBatch(sequences [][]int32) (*Batch, error) {
	if len(sequences) == 0 || len(sequences[0]) < 2 {
		return nil, diag.New(diag.BadInput, "a batch needs sequences of at least two tokens")
	}
	seq := len(sequences[0]) - 1
	b := newBatch(len(sequences), seq)
	for i, tokens := range sequences {
		if len(tokens) != seq+1 {
			return nil, diag.New(diag.BadInput, "sequence %d has %d tokens, the first one %d", i,
				len(tokens), seq+1).Try("pad or truncate all sequences to one length")
		}
		at := i * seq
		copy(b.IDs[at:], tokens[:seq])
		copy(b.Labels[at:at+seq], tokens[1:])
		for k := range seq {
			b.Positions[at+k] = int32(k)
			switch {
			case b.IDs[at+k] < 0:
				return nil, diag.New(diag.BadInput, "token %d of sequence %d is %d", k, i, b.IDs[at+k])
			case b.Labels[at+k] >= 0:
				b.Count++
			}
		}
	}
	b.Total = b.Count
	return b, nil
}

// A Position says how many sequences were taken from each source, by name. A source without
// an entry has given none. It does not depend on the number of ranks.
type Position map[string]int64

// A rowAt is a row of a stream; without one it is a row of nothing.
type rowAt struct {
	stream *stream
	row    int64
	padded bool // no label of it counts
}

// Take gives the sequences of the step that begins at a position, and the position behind it. rows
// is the number of sequences of all ranks; each has a contiguous part of them, of nearly the same
// size. The epochs of a source follow each other without a gap: there is always a next sequence.
func (l *Loader) Take(ctx context.Context, at Position, rows, rank, ranks int) (*Batch, Position,
	error) {
	if err := wanted(ctx); err != nil {
		return nil, nil, err
	}
	if l.unsplit != nil {
		return nil, nil, l.unsplit
	}
	if err := checkRanks(rows, rank, ranks); err != nil {
		return nil, nil, err
	}
	taken, total, err := l.taken(at)
	if err != nil {
		return nil, nil, err
	}
	list := make([]rowAt, rows)
	orders := make([]*permutation, len(l.sources))
	epochs := make([]int64, len(l.sources))
	for i := range list {
		n := next(l.shares, taken, total)
		s := l.sources[n]
		epoch, row := taken[n]/s.stats.Sequences, taken[n]%s.stats.Sequences
		if l.options.Shuffle {
			if orders[n] == nil || epochs[n] != epoch {
				orders[n] = newPermutation(s.stats.Sequences, l.options.Seed, epoch, s.stats.Name)
				epochs[n] = epoch
			}
			row = orders[n].at(row)
		}
		list[i] = rowAt{stream: &s.train, row: row}
		taken[n]++
		total++
	}
	after := Position{}
	for i, s := range l.sources {
		after[s.stats.Name] = taken[i]
	}
	b, err := l.batch(list, rank, ranks)
	return b, after, err
}

// wanted returns an error if the caller does not wait for a batch anymore.
func wanted(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return diag.New(diag.Canceled, "a batch is not read anymore").Wrap(context.Cause(ctx))
}

// checkRanks refuses a batch that has fewer sequences than ranks.
func checkRanks(rows, rank, ranks int) error {
	if ranks < 1 || rank < 0 || rank >= ranks || rows < ranks {
		return diag.New(diag.BadInput, "rank %d of %d cannot have a part of %d rows", rank, ranks, rows).
			Try("take at least as many rows in a step as there are ranks")
	}
	return nil
}

// taken reads a position.
func (l *Loader) taken(at Position) (taken []int64, total int64, err error) {
	if len(l.sources) == 0 {
		return nil, 0, diag.New(diag.BadInput, "the loader is closed")
	}
	taken = make([]int64, len(l.sources))
	known := 0
	for i, s := range l.sources {
		n, ok := at[s.stats.Name]
		if ok {
			known++
		}
		if n < 0 || n >= maxRows || total >= maxRows {
			return nil, 0, diag.New(diag.DataPosition, "%d rows of %q cannot have been taken", n,
				s.stats.Name)
		}
		taken[i] = n
		total += n
	}
	if known < len(at) {
		for _, name := range slices.Sorted(maps.Keys(at)) {
			if !slices.ContainsFunc(l.sources, func(s *source) bool { return s.stats.Name == name }) {
				return nil, 0, diag.New(diag.DataPosition,
					"the position names the source %q, which is not one of these", name).
					Try("take one of %s", strings.Join(l.names(), ", ")).
					Try("give the source its old name, or begin a new run")
			}
		}
	}
	return taken, total, nil
}

// names lists the sources, in order.
func (l *Loader) names() []string {
	return lists.Map(l.sources, func(s *source) string { return fmt.Sprintf("%q", s.stats.Name) })
}

// batch fills in the rows of a rank and counts the labels of all ranks. A cache file that is
// truncated while it is mapped raises a fault, which becomes an error.
func (l *Loader) batch(list []rowAt, rank, ranks int) (b *Batch, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		fault := recover()
		if _, ok := fault.(interface{ Addr() uintptr }); !ok && fault != nil {
			panic(fault) // not a fault of memory
		}
		if fault != nil {
			b, err = nil, diag.New(diag.DataCache, "the token cache changed while it was in use").
				Because("%v", fault).Try("start again: the cache is checked and made anew")
		}
	}()
	from, to := rank*len(list)/ranks, (rank+1)*len(list)/ranks
	b = newBatch(to-from, l.options.Seq)
	for i, at := range list {
		n := at.count(l.options.Seq, l.options.Joined)
		b.Total += n
		if from <= i && i < to {
			b.Count += n
			at.fill(b, i-from, l.options.Joined)
		}
	}
	return b, nil
}

// count gives the number of labels of a row that count: tokens that are to be learned and are not
// the first of a document.
func (r rowAt) count(seq int, joined bool) int64 {
	if r.stream == nil || r.padded {
		return 0
	}
	from := r.row*int64(seq) + 1
	n, c := int64(0), r.stream.cache
	for begin, end := range r.stream.spans(from, from+int64(seq)) {
		n += c.learnedIn(begin, end)
		if joined {
			continue
		}
		for d := c.documentAt(begin-1) + 1; c.start(d) < end; d++ {
			if c.learned(c.start(d)) {
				n--
			}
		}
	}
	return n
}

// fill writes a row as row i of a batch. A row of no source has zeros and counts for nothing.
func (r rowAt) fill(b *Batch, i int, joined bool) {
	span := func(all []int32) []int32 { return all[i*b.Seq : (i+1)*b.Seq] }
	ids, labels := span(b.IDs), span(b.Labels)
	positions, segments := span(b.Positions), span(b.Segments)
	if r.stream == nil {
		for i := range labels {
			labels[i], positions[i] = Ignored, int32(i)
		}
		return
	}
	c, at := r.stream.cache, r.stream.seek(r.row*int64(b.Seq))
	position, segment := int32(0), int32(0)
	token := c.token(at.token)
	for i := range ids {
		ids[i], positions[i], segments[i] = token, position, segment
		position++
		other := at.next()
		token = c.token(at.token)
		labels[i] = token
		if r.padded || !c.learned(at.token) {
			labels[i] = Ignored
		}
		if other && !joined {
			labels[i] = Ignored
			position = 0
			segment++
		}
	}
}

// EvalSequences counts the sequences that Eval gives: the held-out ones, or all if none were held
// out.
func (l *Loader) EvalSequences() int64 {
	n := int64(0)
	for _, s := range l.sources {
		_, rows := s.evaluated(l.holdsOut())
		n += rows
	}
	return n
}

// Documents counts the documents of the sequence that has the most, to train on or to evaluate. It
// looks at every document once.
func (l *Loader) Documents() int64 {
	most := int64(1)
	if l.options.Joined {
		return most
	}
	for _, s := range l.sources {
		for _, part := range []*stream{&s.train, &s.heldOut} {
			if part.cache != nil {
				most = max(most, part.mostDocuments(int64(l.options.Seq)))
			}
		}
	}
	return most
}

// holdsOut reports whether documents are kept for validation.
func (l *Loader) holdsOut() bool {
	return l.options.HoldoutSequences > 0 || l.options.HoldoutShare > 0
}

// evaluated gives what Eval takes of a source, and its rows.
func (s *source) evaluated(held bool) (*stream, int64) {
	if held {
		return &s.heldOut, s.stats.HeldOut
	}
	return &s.train, s.stats.Sequences
}

// Eval gives the validation sequences from first on, source by source in the order of the files.
// Sequences behind the last one have no labels that count: a batch always has the same size.
func (l *Loader) Eval(ctx context.Context, first int64, rows, rank, ranks int) (*Batch, error) {
	if err := wanted(ctx); err != nil {
		return nil, err
	}
	if l.unsplit != nil {
		return nil, l.unsplit
	}
	if err := checkRanks(rows, rank, ranks); err != nil {
		return nil, err
	}
	if first < 0 {
		return nil, diag.New(diag.BadInput, "there is no row %d", first)
	}
	list := make([]rowAt, rows)
	for i := range list {
		list[i] = l.evalRow(first + int64(i))
	}
	return l.batch(list, rank, ranks)
}

// evalRow finds a validation row; the sources follow one after the other. Past the last they begin
// again, and no label counts: rows of one token would all go to the same experts, which have no
// room for them.
func (l *Loader) evalRow(row int64) rowAt {
	for _, s := range l.sources {
		stream, rows := s.evaluated(l.holdsOut())
		if row < rows {
			return rowAt{stream: stream, row: row}
		}
		row -= rows
	}
	n := l.EvalSequences()
	if n == 0 {
		return rowAt{}
	}
	at := l.evalRow(row % n) // what is left of row is behind all of them
	at.padded = true
	return at
}

// Row gives one row of a source in the order of the files; the rows that were held out follow those
// to train on.
func (l *Loader) Row(source string, row int64) (*Batch, error) {
	for _, s := range l.sources {
		if s.stats.Name != source {
			continue
		}
		if last := s.stats.Sequences + s.stats.HeldOut - 1; row < 0 || row > last {
			return nil, diag.New(diag.BadInput, "there is no row %d: the last one is %d", row, last).
				Try("count from 0")
		}
		at := rowAt{stream: &s.train, row: row}
		if row >= s.stats.Sequences {
			at = rowAt{stream: &s.heldOut, row: row - s.stats.Sequences}
		}
		return l.batch([]rowAt{at}, 0, 1)
	}
	return nil, diag.New(diag.BadInput, "there is no source %q", source).
		Because("the sources are %s", strings.Join(l.names(), ", "))
}
