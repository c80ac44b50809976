package kernels

import "math/bits"

// plannedDocuments is how many documents of a sequence attention keeps apart where nobody knows the
// data: as many as one call has. More need further calls, which take longer to compile (22 s
// instead of 8 for 64 documents, llama3.1-8b), but no more memory.
const plannedDocuments = packedFactor

// anyDocuments is for attention that has no table of documents.
const anyDocuments = 1 << 30

// A PackedLevel is one call of cuDNN for some of the documents of a sequence, which have at most
// Length tokens and are too long for the next level. Parts is how many sequences of that length a
// sequence is, and Segments how many documents each may have on average.
type PackedLevel struct{ Parts, Length, Segments int64 }

// packedFactor is what lies between the lengths of two levels. With 16 instead, two calls are
// enough for 256 documents, and a step of llama3.1-8b with two sequences of 8192 tokens needs 4.3
// GiB more (compiled; 22.7 GiB with 4, 22.6 without documents).
const packedFactor = 4

// PackedWorkspace is the scratch memory in bytes of the gradient's largest call, for queries of
// some number of elements in sequences of seq tokens: float32 sums of their gradient, with room for
// packedFactor documents as long as the sequence, or for more if seq cannot be divided further.
// Compiled for sm_120 it is half as much again.
func (s *Selector) PackedWorkspace(elements, seq, documents int64) (bytes int64) {
	for _, l := range PackedLevels(seq, documents) {
		bytes = max(bytes, 4*l.Segments*elements)
	}
	if s.Arch() == "sm_120" {
		return bytes * 3 / 2
	}
	return bytes
}

// Offsets tells whether calls of segments take offsets: XLA gives values the offsets of keys, so
// that their heads must have one size, and only sizes of at most 128 have a plan. Else segments are
// gathered into rows of their own.
func (a Attention) Offsets() bool { return a.Head <= 128 && a.value() == a.Head }

// RowsWorkspace is the memory in bytes of the gradient's largest call of segments that are rows of
// their own, beside [Selector.PackedWorkspace]: operands and results, bytes in all, in sequences of
// seq tokens, as many times as there are segments a sequence.
func (s *Selector) RowsWorkspace(bytes, seq, documents int64) (most int64) {
	for _, l := range PackedLevels(seq, documents) {
		most = max(most, l.Segments*bytes)
	}
	return most
}

// PackedLevels gives the calls for sequences with at most some number of documents, which have a
// workspace as if each had packedFactor documents as long as itself; the last call has a larger one
// if its sequences are not divisible by packedFactor. A sequence has less than
// packedFactor documents longer than 1/packedFactor of it, whatever they are, so the first level
// has room for all of them, and the next for those that are longer than 1/packedFactor of the rest.
func PackedLevels(seq, documents int64) (list []PackedLevel) {
	documents = min(max(documents, 2), seq)
	for parts := int64(1); ; parts *= packedFactor {
		each := (documents + parts - 1) / parts
		if each <= packedFactor || seq%(parts*packedFactor) != 0 {
			power := int64(1) << bits.Len64(uint64(each-1)) // few programs for many numbers
			return append(list, PackedLevel{parts, seq / parts, max(power, 2)})
		}
		list = append(list, PackedLevel{parts, seq / parts, packedFactor})
	}
}
