package estimate

import "math"

// minClosed is the number of forward passes from which the closed form of 1F1B is taken. Below it
// sends can miss a chain (1.3 % at 2 ranks and 6 microbatches), and walking the schedule is cheap.
const minClosed = 64

// manyRanks is the number of ranks from which stages that differ are walked: the closed form of
// 1F1B was off by 1.95 % for qwen3-235b-a22b, whose 94 layers are stages of one or two on 64 ranks.
const manyRanks = 64

// closed reports whether a closed form of the makespan exists.
func closed(name string, l *layout, stages []Stage) bool {
	return l.pipe == 1 || name == "gpipe" || name == "1f1b" && l.pipe*l.micros >= minClosed &&
		(l.pipe < manyRanks || evenBut(stages)) || name == "interleaved" && evenBut(stages)
}

// makespan is the seconds of a pipeline, in closed form where there is one.
func (e *Estimator) makespan(name string, l *layout, stages []Stage) (float64, error) {
	m, send := float64(l.micros), stages[0].Send
	switch {
	case !closed(name, l, stages):
		return e.walked(name, l, stages, send)
	case l.pipe == 1:
		return m * stages[0].Both(), nil
	case name == "gpipe":
		return gpipe(stages, m, send), nil
	case name == "1f1b":
		return oneByOne(stages, l.micros, send), nil
	}
	return interleavedTime(stages, l, m, send), nil
}

// evenBut reports whether the stages are equal apart from the ends of the model: the embedding may
// lengthen the first a little, the head the last.
func evenBut(stages []Stage) bool {
	last := len(stages) - 1
	inner := stages[min(1, last)].Both()
	for i := 1; i < last; i++ {
		if d := stages[i].Both() - inner; math.Abs(d) > 1e-3*inner {
			return false
		}
	}
	first := stages[0].Both() / inner
	return first > 0.999 && first < 1.03 && stages[last].Both() > 0.999*inner
}

// gpipe runs all forward passes, then all backward passes; each is a chain of stages at the pace
// of the slowest.
func gpipe(stages []Stage, m, send float64) float64 {
	var forward, backward, slowF, slowB float64
	for i := range stages {
		f, b := stages[i].Forward, stages[i].Input+stages[i].Weight
		forward += f
		backward += b
		slowF, slowB = max(slowF, f), max(slowB, b)
	}
	return forward + backward + (m-1)*(slowF+slowB) + 2*send*float64(len(stages)-1)
}

// oneByOne is 1F1B: the longest chain of passes that wait for each other. Rank s runs w = P-1-s
// forward passes ahead, then one forward and one backward pass in turns. A chain goes down to a
// stage and comes back, and between the two it may
//
//   - stay with a rank that is busy from its first pass to its last;
//   - or go on to the last stage and back, at the start, at the end, or both, while the rank that
//     it left does the passes that it runs ahead;
//   - or go round between two stages s and e, which takes a pass of each and two sends between each
//     two, and advances e-s+1 microbatches.
func oneByOne(stages []Stage, micros int64, send float64) float64 {
	last := len(stages) - 1
	m := float64(micros)
	whole := 2 * send * float64(last)
	for i := range stages {
		whole += stages[i].Both()
	}
	longest, before := whole, 0.0
	for s := range stages {
		t, f, w := stages[s].Both(), stages[s].Forward, float64(last-s)
		rest := max(m-1-w, 0)
		longest = max(longest, before+m*t, whole+(m-1)*(t-f)+rest*f, whole+(m-1)*f+rest*(t-f))
		before += t + 2*send
	}
	after, sum := 0.0, 0.0
	for e := last; e >= 0; e-- {
		rest := micros - 1 - int64(last-e)
		if rest <= 0 {
			break
		}
		sum = 0
		for s := e; s >= 0; s-- {
			sum += stages[s].Both()
			n := int64(e - s + 1)
			if n > rest {
				break
			}
			round := sum + 2*send*float64(e-s)
			longest = max(longest, whole+after+float64(rest/n)*round)
			if send == 0 {
				break // longer rounds are means of shorter ones
			}
		}
		after += stages[e].Both() + 2*send
	}
	return longest
}

// Both is the seconds of a forward and a backward pass.
func (s Stage) Both() float64 { return s.Forward + s.Input + s.Weight }

// interleavedTime is interleaved 1F1B with stages of which at most the last is longer. A rank
// works from the arrival of the first microbatch until the last one's way back. While the pipeline
// fills and drains, a microbatch returns to a rank just when it has finished the others of its
// group, so every send on the way through all stages is exposed.
func interleavedTime(stages []Stage, l *layout, m, send float64) float64 {
	n := int(l.pipe)
	longest, before := 0.0, 0.0
	for r := range n {
		busy := 0.0
		for i := r; i < len(stages); i += n {
			busy += stages[i].Both()
		}
		sends := r
		if r == n-1 {
			sends = len(stages) - 1
		}
		longest = max(longest, m*busy+before+2*send*float64(sends))
		before += stages[r].Both()
	}
	return longest
}
