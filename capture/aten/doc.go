// Package aten turns the program of torch.export into a model: the graph of its loss.
//
//	archive, err := pt2.Open("model.pt2")
//	...
//	m, err := aten.New(archive)
//	g, err := m.Graph(model.Shape{Batch: 8, Seq: 1024, Elem: dtype.BF16})
//
// # Names of dimensions
//
// Dimensions of ATen have places, and dimensions of the graph have names, by which plans shard and
// policies choose. One idea leads from places to names: an axis of a tensor is a product of
// dimensions. A view that splits an axis splits a dimension, a view that joins axes lists the
// dimensions of one axis, and a transposition puts axes in another order: none of them moves
// anything. An operation that lines two axes up makes their dimensions one. What was split or made
// one is remembered, and the program is read again until nothing new is found; by then the weight
// [out, in] of queries is [heads, head, embed], since a view has split its result and a residual
// has joined its input. Two dimensions of one tensor are never made one: there a tensor is renamed
// on the way, as keys are that come from the queries' sequence.
//
// A dimension has the name that an operation knows: attention knows seq, keys, heads, kv and head,
// the loss vocab, the embedding vocab and embed, experts theirs. Others are called by what they
// are part of, or numbered.
//
// # What becomes of the program
//
// Regions without gradients are inlined, operations in place become operations on what they change,
// and what computes nothing is dropped: assertions, aliases, dropout of nothing. The labels stand
// where the logits stand ([model.InputLabels]): a shift in the program is taken out. The mean over
// labels becomes a sum times [model.InputShare], and what counts along the sequence reads
// [model.InputPositions]. Buffers that are not trained are written as what they count.
//
// What is not supported is listed in one error: every operator, with its module and source line.
package aten
