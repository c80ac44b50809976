package data

import "github.com/deepwell/deepwell/diag"

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
