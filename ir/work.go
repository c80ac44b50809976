package ir

import "slices"

// A Class is the kind of work that an operation is on a device.
type Class uint8

// The classes. Fused is what a compiler joins with its neighbours into one kernel that reads what
// comes in and writes what goes out: alone it has no price.
const (
	Fused      Class = iota
	Matmul           // Batch GEMMs of [M, K] and [K, N]
	Attend           // attention of M queries of K elements, N keys, values of V, for Batch heads
	Streaming        // Bytes read and written, by a kernel of its own
	Quantizing       // Bytes read to be quantized to Format
	Sending          // collectives alone
	Moving           // Bytes between the device and its host
)

// A Work is what one operation asks of a device, beside its shape rule and its gradient: the cost
// model adds it up (package cost). Kernels may override it (lower, Kernel.Work). Sizes are per
// device.
type Work struct {
	Class          Class
	Batch, M, K, N int64
	V              int64 // of attention
	Bytes          int64
	Format         Format // of products and of what is quantized; "" is the type of the arguments
	Sends          []Send
}

// A Send is equal tensors that a device sends in one operation.
type Send struct {
	Kind string // all_reduce, all_gather, reduce_scatter, all_to_all or permute
	Axes []string
	// Count is how many there are, and Bytes the size of one, as the group sees the whole of it: the
	// result of a gather, the argument of a scatter.
	Count, Bytes int64
	Of           *Value // what is sent, if it may be sent again; else nil
}

// Permute is the kind of a Send to one other device: rings have no operation of their own.
const Permute = "permute"

// Work is what an operation of the graph asks of a device.
func (g *Graph) Work(op *Op) Work {
	if row := op.spec(); row != nil && row.Work != nil {
		return row.Work(g, op)
	}
	return Work{}
}

// embeddingWork reads and writes the rows that are looked up, not the table.
func embeddingWork(_ *Graph, op *Op) Work { // the rows that are looked up, not the table
	return Work{Class: Streaming, Bytes: 2 * bytesOf(op.Out[0])}
}

// embeddingDWWork writes zeros, then adds rows to them.
func embeddingDWWork(_ *Graph, op *Op) Work { // zeros are written, then rows added to
	return Work{Class: Streaming, Bytes: 3*bytesOf(op.In[1]) + bytesOf(op.Out[0])}
}

// quantizeWork reads the source; codes and scales follow from the format.
func quantizeWork(_ *Graph, op *Op) Work {
	return Work{Class: Quantizing, Bytes: bytesOf(op.In[0]), Format: Format(op.Attrs.Text("format"))}
}

// joinWork is two all-reduces, maxima and sums, or one for sums alone.
func joinWork(_ *Graph, op *Op) Work {
	n := int64(2) // the largest, and the sums
	if op.Attrs.Bool("sum") {
		n = 1
	}
	return sends(op, "all_reduce", n, bytesOf(op.In[0]))
}

// reduceWork is an all-reduce or reduce-scatter of the argument.
func reduceWork(_ *Graph, op *Op) Work { return sends(op, op.Kind, 1, bytesOf(op.In[0])) }

// gatherWork may be repeated in the backward pass, so that it names its argument.
func gatherWork(_ *Graph, op *Op) Work {
	w := sends(op, op.Kind, 1, bytesOf(op.Out[0]))
	w.Sends[0].Of = op.In[0]
	return w
}

// exchangeWork is an all-to-all of what a device has, part of which stays with it.
func exchangeWork(_ *Graph, op *Op) Work { return sends(op, op.Kind, 1, bytesOf(op.In[0])) }

// moveWork is a copy between device and host.
func moveWork(_ *Graph, op *Op) Work { return Work{Class: Moving, Bytes: bytesOf(op.In[0])} }

// bytesOf is the size of a device's part of a value.
func bytesOf(v *Value) int64 { return v.Type.Shape().Bytes() }

// streams is a kernel that reads what comes in and writes what goes out.
func streams(_ *Graph, op *Op) Work {
	w := Work{Class: Streaming}
	for _, v := range slices.Concat(op.In, op.Out) {
		w.Bytes += bytesOf(v)
	}
	return w
}

// sends is one collective along the axes of an operation; no work without axes.
func sends(op *Op, kind string, count, bytes int64) Work {
	if len(op.Axes()) == 0 {
		return Work{}
	}
	axes := slices.Sorted(slices.Values(op.Axes()))
	return Work{Class: Sending, Sends: []Send{{Kind: kind, Axes: axes, Count: count, Bytes: bytes}}}
}

// dots is the GEMM of a dot or linear.
func dots(_ *Graph, op *Op) Work { return dotWork(op.In[0], op.In[1], op.Attrs.List("over")) }

// dotWork sums over some dimensions; others that both arguments have go side by side.
func dotWork(a, b *Value, over []string) Work {
	w := Work{Class: Matmul, Batch: 1, M: 1, K: 1, N: 1}
	for _, d := range a.Type.Dims {
		switch {
		case slices.Contains(over, d.Name):
			w.K *= d.Size
		case b.Type.Index(d.Name) >= 0:
			w.Batch *= d.Size
		default:
			w.M *= d.Size
		}
	}
	for _, d := range b.Type.Dims {
		if !slices.Contains(over, d.Name) && a.Type.Index(d.Name) < 0 {
			w.N *= d.Size
		}
	}
	return w
}

// blockWork is a GEMM of two quantized values; format is the attribute with their format.
func blockWork(format string) func(*Graph, *Op) Work {
	return func(_ *Graph, op *Op) Work {
		f, values, err := formatOf(op, format)
		if err != nil {
			return Work{}
		}
		w := dotWork(op.In[0], op.In[values], op.Attrs.List("over"))
		w.Format = f
		return w
	}
}

// amaxWork reads a tensor; devices that hold shards of it all-reduce one number.
func amaxWork(_ *Graph, op *Op) Work {
	w := sends(op, "all_reduce", 1, bytesOf(op.Out[0]))
	w.Class, w.Bytes, w.Format = Quantizing, bytesOf(op.In[0]), NVFP4
	return w
}

// crossEntropyWork reads the logits. Where the vocabulary is sharded, devices all-reduce the
// largest logit, then the sum of exponentials and the label's logit together.
func crossEntropyWork(g *Graph, op *Op) Work {
	w := streams(g, op)
	if rows := bytesOf(op.Out[0]); len(op.Axes()) > 0 {
		for _, bytes := range []int64{rows, 2 * rows} {
			w.Sends = append(w.Sends, sends(op, "all_reduce", 1, bytes).Sends...)
		}
	}
	return w
}

// attentionWork counts queries against all keys of the sequence; what a mask leaves out, and what a
// kernel computes nevertheless, is for those to say who know the kernel. In a ring a device passes
// its keys and values to the next n−1 times; on the way back partial sums of their gradients travel
// in f32, and the first term and the rounded sum in the type of the keys. If a window needs only a
// halo, that travels instead, once for each chunk of a device, and its gradient back.
func attentionWork(g *Graph, op *Op) Work {
	q, k := op.In[0].Type, op.In[1].Type
	keys := allKeys(g, op).Size(Keys)
	w := Work{Class: Attend, M: q.Size(Seq), K: q.Size(HeadDim), N: keys,
		V: op.In[2].Type.Size(HeadDim)}
	w.Batch = q.Shape().Elements() / max(w.M*w.K, 1)
	axis := op.Attrs.Text("ring")
	if axis == "" {
		return w
	}
	n := g.AxisSize(axis)
	add := func(count, bytes int64, of *Value) {
		w.Sends = append(w.Sends, Send{Permute, []string{axis}, count, bytes, of})
	}
	halo, chunks := op.Halo(), int64(1)
	if op.Attrs.Bool("balanced") {
		chunks = 2
	}
	for _, v := range op.In[1:3] {
		shard := v.Type.Shape()
		if halo > 0 {
			bytes := shard.Bytes() / k.Size(Keys) * halo
			if add(chunks, bytes, v); op.Kind == "attention_grad" {
				add(chunks, bytes, nil)
			}
			continue
		}
		add(n-1, shard.Bytes(), v)
		if op.Kind == "attention_grad" {
			add(n-2, 4*shard.Elements(), nil)
			add(2, shard.Bytes(), nil)
		}
	}
	return w
}

// MeanKeys is the mean number of keys that a query of a causal row of seq tokens sees if it looks
// back over window of them: the first see 1, 2, ..., all others window.
func MeanKeys(seq, window float64) float64 {
	w := min(seq, window)
	return (w*(w+1)/2 + (seq-w)*w) / seq
}
