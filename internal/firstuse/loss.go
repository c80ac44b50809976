package firstuse

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
)

// SmallLoss gives a smaller loss: fewer rows, whose last chunk of columns is as full.
func SmallLoss(l fused.Loss) fused.Loss {
	if l.Cols > 2*fused.LogitChunk {
		l.Cols = fused.LogitChunk + l.Cols%fused.LogitChunk
	}
	l.Rows = min(l.Rows, 6)
	return l
}

// compareLoss is [Compare] of a loss.
func compareLoss(ctx context.Context, e *engine.Engine, l fused.Loss, seed uint64) (apart float64,
	err error) {
	k, err := l.Kernel()
	if err != nil {
		return 0, err
	}
	d := drawLoss(l, rand.New(rand.NewPCG(seed, 22)))
	got, err := run(ctx, e, k, d.operands)
	if err != nil {
		return 0, err
	}
	return d.apart(k, got), nil
}

// A drawnLoss is operands of a loss and what it must give: the loss, the log-sum-exp and the
// gradient of the logits.
type drawnLoss struct {
	operands [][]byte
	want     [3][]float32
}

// drawLoss makes random operands. The last row has no label.
func drawLoss(l fused.Loss, r *rand.Rand) (d drawnLoss) {
	var logits, labels, factors []byte
	d.want[2] = make([]float32, l.Rows*l.Cols)
	for n := range l.Rows {
		x, grad := make([]float64, l.Cols), d.want[2][n*l.Cols:]
		total, label, by := 0.0, r.IntN(l.Cols), r.Float32()+0.5
		for c := range x {
			w := dtype.BF16FromF32(float32(r.NormFloat64() * 4))
			logits, x[c] = binary.LittleEndian.AppendUint16(logits, w), float64(dtype.F32FromBF16(w))
			total += math.Exp(x[c])
		}
		lse, loss := math.Log(total), math.Log(total)-x[label]
		if n == l.Rows-1 && n > 0 {
			label, loss = -1, 0
		}
		for c := range x {
			p := math.Exp(x[c] - lse)
			if c == label {
				p--
			}
			if label >= 0 {
				grad[c] = dtype.F32FromBF16(dtype.BF16FromF32(float32(p) * by))
			}
		}
		labels = binary.LittleEndian.AppendUint32(labels, uint32(int32(label)))
		factors = binary.LittleEndian.AppendUint32(factors, math.Float32bits(by))
		d.want[0], d.want[1] = append(d.want[0], float32(loss)), append(d.want[1], float32(lse))
	}
	d.operands = [][]byte{logits, labels, factors}
	return d
}

// apart is how far results are from what they must be.
func (d drawnLoss) apart(k *triton.Kernel, got [][]byte) (apart float64) {
	for i, b := range got {
		elem := k.Args[len(d.operands)+i].Elem
		apart = max(apart, distance(numbersOf(elem, b), d.want[i]))
	}
	return apart
}
