package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/step"
)

// MaxEvalSequences bounds the sequences of a validation, so that one percent of a large corpus does
// not take longer than the training in between. They are the same sequences every time.
const MaxEvalSequences = 1024

// loop makes the steps that Run has left, with the recipe's saves and validations. ctx ends when
// the run has stalled, stop when it is to stop after a step. A validation is given up for a stop,
// and made up for when the run is resumed.
func (t *Trainer) loop(ctx, stop context.Context) error {
	r := t.opts.Recipe
	if t.owes {
		if stopped, err := t.validate(ctx, stop); err != nil || stopped {
			return t.halt(ctx, stop, err)
		}
	}
	if t.step >= t.end() {
		t.opts.Events.Emit(event.Note{Text: fmt.Sprintf("nothing is left to do: step %d of %d is done"+
			" · next: deepwell export %s -o DIR", t.step, r.Steps, filepath.ToSlash(r.Out))})
	}
	for t.step < t.end() {
		if stopped, err := t.vote(ctx, stop); err != nil || stopped {
			return t.halt(ctx, stop, err)
		}
		if t.awaitData(ctx, stop) {
			return t.halt(ctx, stop, nil)
		}
		if _, err := t.Step(ctx); errors.Is(err, diag.DataEnd) {
			return t.dataEnded(ctx, stop)
		} else if err != nil {
			return t.failed(ctx, err)
		}
		if t.opts.Eval != nil && t.due(r.Eval.Every) {
			if stopped, err := t.validate(ctx, stop); err != nil || stopped {
				return t.halt(ctx, stop, err)
			}
		}
		if t.due(r.Save.Every) {
			if err := t.save(ctx, t.step == t.end()); err != nil {
				return err
			}
		}
		if t.step < t.end() && (t.due(r.Eval.Every) || t.due(r.Save.Every)) {
			t.opts.Events.Emit(event.Busy{Task: fmt.Sprintf("step %d", t.step+1)})
		}
	}
	return nil
}

// awaitData waits for the next batch or a request to stop, and reports whether there was a request:
// data may come from a program that was asked to stop, too, and gives none anymore. Several
// processes must decide alike, and only vote.
func (t *Trainer) awaitData(ctx, stop context.Context) bool {
	defer t.phase(phaseData)()
	if t.others != nil {
		return false
	}
	if t.next == nil {
		t.prefetch(ctx, t.at)
	}
	select {
	case <-t.next.done:
		return false
	case <-ctx.Done():
		return false
	case <-stop.Done():
		return true
	}
}

// dataEnded ends a run whose data has come to its end: with the validation and the checkpoint of a
// last step.
func (t *Trainer) dataEnded(ctx, stop context.Context) error {
	t.opts.Events.Emit(event.Note{Text: fmt.Sprintf("the data has ended after step %d of %d", t.step,
		t.opts.Recipe.Steps)})
	if r := t.opts.Recipe; t.opts.Eval != nil && t.step > 0 &&
		(r.Eval.Every == 0 || t.step%r.Eval.Every != 0) {
		if stopped, err := t.validate(ctx, stop); err != nil || stopped {
			return t.halt(ctx, stop, err)
		}
	}
	return t.save(ctx, true)
}

// failed ends a run with an error. If the state is whole, as after an error of the data, the steps
// since the last checkpoint are saved; else it may be between two steps.
func (t *Trainer) failed(ctx context.Context, err error) error {
	if t.others != nil || t.usable() != nil || ctx.Err() != nil || t.step == 0 ||
		errors.Is(err, diag.TrainingLost) {
		return err
	}
	return errors.Join(err, t.save(ctx, true))
}

// vote reports whether any process of the run was asked to stop; all get the same answer.
func (t *Trainer) vote(ctx, stop context.Context) (bool, error) {
	defer t.phase(phaseVote)()
	return t.others.any(ctx, stop.Err() != nil)
}

// halt ends a run that was asked to stop, with a checkpoint, or one that failed.
func (t *Trainer) halt(ctx, stop context.Context, err error) error {
	if err == nil {
		err = t.save(ctx, true)
	}
	if err != nil {
		return err
	}
	return diag.New(diag.Canceled, "stopped after step %d of %d, saved", t.step, t.opts.Recipe.Steps).
		Wrap(context.Cause(stop)).Try("run the same command again to go on").
		Exit(diag.Terminated) // also where another process of the run was asked
}

// end is the last step that Run makes.
func (t *Trainer) end() int {
	if t.opts.Until > 0 {
		return min(t.opts.Until, t.opts.Recipe.Steps)
	}
	return t.opts.Recipe.Steps
}

// due reports whether something with an interval of steps is due. Everything is after the last
// step.
func (t *Trainer) due(every int) bool {
	return t.step == t.end() || every > 0 && t.step%every == 0
}

// A StepResult is the outcome of one step.
type StepResult struct {
	Step     int     // counted from 1
	Loss     float64 // the mean over the labels of the batch
	GradNorm float64 // the norm of all gradients together, before clipping
	LR       float64 // the learning rate
	Tokens   int64   // of the batch
	Seconds  float64 // including the wait for data, and the time to save a rejected step
	// Rejected says why the guard refused the update; "" if the state was updated.
	Rejected string
}

// Step makes one training step: it takes the next batch from the Dataset, computes gradients,
// checks loss and gradient norm, updates the state, and adapts the precision of quantized GEMMs. A
// rejected step leaves every bit of the state as it was, and the next step takes the next batch;
// after eight in a row Step fails. After the last step, and after Options.Until, it returns
// [io.EOF].
//
// Nothing else is io.EOF: an error of the Dataset, io.EOF included, is returned as a [diag.Error]
// for which errors.Is(err, io.EOF) is false, with the code [diag.DataRead] unless the Dataset gave
// it another. Step may then be called again and reads the same batch again. A Dataset that has an
// end gives an error of the code [diag.DataEnd] there, where Run saves and returns nil.
//
// Every 100 steps, as before each save, devices that must have the same bits of the state are
// compared; if one differs, the error has the code [diag.ReplicasDiffer], and nothing of the state
// is saved. Step neither saves nor validates.
// If ctx ends while a step is on its way, the error has the code
// [diag.Canceled] and wraps the context's cause. While Step waited for data nothing has happened,
// and it may be called again. After an error on the devices, a cancellation included, the step is
// abandoned: the trainer can only be closed, and its methods return an error of the code
// [diag.TrainerClosed]. To stop between steps, stop calling Step.
func (t *Trainer) Step(ctx context.Context) (StepResult, error) {
	if err := t.usable(); err != nil {
		return StepResult{}, err
	}
	if t.step >= t.end() {
		return StepResult{}, io.EOF
	}
	t.pending = false
	start, end := t.opts.Now(), t.mark("wait for data")
	b, err := t.batch(ctx)
	end()
	if err != nil {
		return StepResult{}, t.canceled(ctx, err)
	}
	number := t.step + 1
	end = t.mark("step")
	r, err := t.oneStep(ctx, b, start)
	end()
	if err == nil && t.step%replicaSteps == 0 {
		err = t.checkReplicas(ctx)
	}
	if err == nil {
		err = t.joinSpans(ctx, number)
	}
	err = t.canceled(ctx, err)
	if err != nil && !errors.Is(err, diag.TrainingLost) { // after which the state is sound
		t.abandon(err, "step %d was abandoned", number)
	}
	return r, err
}

// canceled gives an error that the end of ctx has caused the code Canceled.
func (t *Trainer) canceled(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && !errors.Is(err, diag.Canceled) &&
		(errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
		return stopped(ctx, "in step %d", t.step+1)
	}
	return err
}

// oneStep makes the step of a batch, which began at a time.
func (t *Trainer) oneStep(ctx context.Context, b *prefetched, start time.Time) (StepResult, error) {
	// Read the next batch while the devices compute this one, but none behind the last step.
	if t.step+1 < t.end() {
		t.prefetch(ctx, b.after)
	}
	if err := t.controller.begin(ctx); err != nil {
		return StepResult{}, err
	}
	defer t.phase(t.controller.phase())()
	loss, err := t.gradientsOf(ctx, b)
	if err != nil {
		return StepResult{}, err
	}
	// The host decides about the loss and the scales, the update programs about the gradient: its
	// norm is known only after it was reduced, and a round trip would stall the devices.
	maxLoss, maxNorm := t.limits()
	lr := t.schedule.LR(t.step)
	sound, err := t.controller.sound(ctx)
	if err != nil {
		return StepResult{}, err
	}
	// +Inf is within a limit of +Inf, and its gradient may be finite.
	commit := finite(loss) && loss <= maxLoss && sound
	norm, applied, err := t.exec.update(ctx, commit, lr, maxNorm)
	if err != nil {
		return StepResult{}, err
	}
	// The monitor sees every step, also a rejected one: that may be why a GEMM has to fall back.
	why, err := t.controller.observe(ctx, loss, norm)
	if err != nil {
		return StepResult{}, err
	}
	result := StepResult{Step: t.step + 1, Loss: loss, GradNorm: norm, LR: lr,
		Tokens: int64(b.batch.Sequences) * int64(b.batch.Seq)}
	if applied && !finite(norm) {
		// The programs apply no such gradient: the devices compute wrongly, and nothing is saved.
		return result, diag.New(diag.DeviceFailed, "an update was applied with a gradient norm"+
			" of %v", norm).At("step %d", result.Step).
			Try("deepwell doctor; then run the same command again to go on")
	}
	if !applied {
		result.Rejected = cmp.Or(t.guard.judge(loss, norm), why)
		err := t.reject(ctx, b, result)
		result.Seconds = t.opts.Now().Sub(start).Seconds()
		return result, err
	}
	t.guard.accept(loss, norm)
	t.last.Loss = loss
	t.updates++
	t.advance(b)
	result.Seconds = t.opts.Now().Sub(start).Seconds()
	t.report(result)
	t.reportExperts(result)
	return result, nil
}

// gradientsOf is the first half of the step of a batch whose inputs may be on the devices already.
func (t *Trainer) gradientsOf(ctx context.Context, b *prefetched) (float64, error) {
	t.exec.staged = b.staged
	defer func() { t.exec.staged = nil }()
	defer b.staged.free()
	return t.hooks.gradients(ctx, b.batch)
}

// advance counts a step.
func (t *Trainer) advance(b *prefetched) { t.step, t.at = t.step+1, b.after }

// A prefetched is a batch that is read while the devices are busy with the one before.
type prefetched struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when the rest is set
	batch  *data.Batch
	after  data.Position
	err    error // of the Dataset
	bad    error // why the programs cannot take the batch
	// staged has the inputs that are on the devices already; nil if the batch was not read ahead.
	staged *stagedBatch
}

// prefetch begins to read the batch at a position. The batch is for a later step, whose context may
// be another one: only dropPrefetched cancels the read.
func (t *Trainer) prefetch(ctx context.Context, at data.Position) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &prefetched{cancel: cancel, done: make(chan struct{})}
	t.next = p
	places, rows := t.exec.stagedPlaces(), int(t.programs.Shape.Batch)
	go func() {
		defer close(p.done)
		defer cancel()
		defer func() { // nobody but us can recover here
			if r := recover(); r != nil {
				p.err = diag.New(diag.DataRead, "the dataset panicked: %v", r).Because("%s", debug.Stack()).
					Try("correct its method Take")
			}
		}()
		p.batch, p.after, p.err = t.opts.Data.Take(ctx, at, t.opts.Recipe.Batch, 0, 1)
		if p.err != nil {
			return
		}
		if p.batch, p.bad = t.checkBatch(p.batch, t.opts.Recipe.Batch); p.bad == nil && ctx.Err() == nil {
			p.staged = stage(p.batch, places, rows)
		}
	}()
}

// batch waits for the batch of the next step. After an error it is read again.
func (t *Trainer) batch(ctx context.Context) (*prefetched, error) {
	defer t.phase(phaseData)()
	if err := t.hasData(); err != nil {
		return nil, err
	}
	if err := stopped(ctx, "before step %d", t.step+1); err != nil {
		return nil, err
	}
	if t.next == nil {
		t.prefetch(ctx, t.at)
	}
	select {
	case <-t.next.done:
		p := t.next
		t.next = nil
		if p.err != nil {
			return nil, readError(p.err, "the batch of step %d", t.step+1)
		}
		err := p.bad
		if err == nil && p.after == nil {
			p.staged.free()
			err = diag.New(diag.BadInput, "the dataset gave no position behind the batch of step %d",
				t.step+1).Try("return the position from which the next batch is taken")
		}
		return p, err
	case <-ctx.Done():
		return nil, stopped(ctx, "while step %d waited for data", t.step+1)
	}
}

// hasData returns an error if the run has no Dataset.
func (t *Trainer) hasData() error {
	if t.opts.Data == nil {
		return diag.New(diag.BadInput, "the run has no dataset").Try("set train.Options.Data")
	}
	return nil
}

// checkBatch refuses a batch that the programs cannot take, or would take without a word: an
// embedding clamps ids that it does not have. It returns a copy whose labels are counted, since
// who fills a batch by hand or masks labels may leave Count and Total as they were.
func (t *Trainer) checkBatch(b *data.Batch, sequences int) (*data.Batch, error) {
	seq := t.opts.Recipe.Seq
	if b == nil || b.Sequences != sequences || b.Seq != seq {
		return nil, diag.New(diag.BadInput, "there is no batch of %d sequences of %d tokens",
			sequences, seq).Try("data.NewBatch takes sequences of seq+1 tokens")
	}
	for _, list := range [][]int32{b.IDs, b.Labels, b.Positions, b.Segments} {
		if len(list) != sequences*seq {
			return nil, diag.New(diag.BadInput, "a batch of %d sequences of %d tokens has an array of"+
				" %d elements", sequences, seq, len(list)).
				Try("IDs, Labels, Positions and Segments have Sequences·Seq elements each")
		}
	}
	if err := t.checkDocuments(b); err != nil {
		return nil, err
	}
	counted := *b
	counted.Count = 0
	vocab := t.opts.Model.Facts().Vocab
	if vocab <= 0 { // a model of one's own may not say
		vocab = math.MaxInt32 + 1
	}
	for i, id := range b.IDs {
		label, position := b.Labels[i], b.Positions[i]
		switch {
		case id < 0 || int64(id) >= vocab:
			return nil, outside(i, seq, "is %d, and the model has %d", id, vocab).
				Try("tokenize with the model's own tokenizer")
		case label != data.Ignored && (label < 0 || int64(label) >= vocab):
			return nil, outside(i, seq, "has the label %d, and the model has %d tokens", label, vocab).
				Try("a label is the next token, or data.Ignored (%d)", data.Ignored)
		case position < 0 || int(position) >= seq:
			return nil, outside(i, seq, "has the position %d, and a sequence %d", position, seq).
				Try("positions count from 0 in each document")
		case label != data.Ignored:
			counted.Count++
		}
	}
	counted.Total = counted.Count // the trainer reads whole batches
	return &counted, nil
}

// checkDocuments refuses document numbers of another kind than a loader gives, and more documents
// than attention has room for, which would attend to nothing.
func (t *Trainer) checkDocuments(b *data.Batch) error {
	most := documentRoom(t.programs)
	for i, n := range b.Segments {
		before := int32(-1)
		if i%b.Seq > 0 {
			before = b.Segments[i-1]
		}
		switch {
		case n != before+1 && (n != before || before < 0):
			return outside(i, b.Seq, "is of document %d, behind document %d", n, before).
				Try("Segments count the documents of each sequence from 0 on")
		case most > 0 && int64(n) >= most:
			return outside(i, b.Seq, "is of document %d, and attention has room for %d", n, most).
				Try("a Documents method of the dataset that says how many a sequence has").
				Try("leave documents out of the plan, if it says how many")
		}
	}
	return nil
}

// documentRoom is how many documents of a sequence programs keep apart; 0 if a warning has said
// that they keep none apart. If the plan or the data says that a sequence is one document, there is
// no mask on GPUs, and a second document would attend to the first.
func documentRoom(p *step.Programs) int64 {
	spec := p.Spec()
	said := spec.Documents
	if spec.Plan != nil {
		said = cmp.Or(spec.Plan.Documents, said)
	}
	if said == 1 {
		return 1
	}
	return p.Shape.Documents
}

// outside is an error of one token of a batch.
func outside(i, seq int, format string, args ...any) *diag.Error {
	return diag.New(diag.BadInput, "token %d of sequence %d %s", i%seq, i/seq,
		fmt.Sprintf(format, args...))
}

// readError gives an error of a Dataset or an EvalSource a code. io.EOF ends a run, so that the
// error of a dataset must not wrap it.
func readError(err error, format string, args ...any) error {
	eof := errors.Is(err, io.EOF)
	if _, ok := errors.AsType[*diag.Error](err); ok && !eof {
		return err
	}
	e := diag.New(diag.DataRead, format+" cannot be read", args...)
	if eof {
		return e.Because("%v", err).Wrap(io.ErrUnexpectedEOF).
			Try("begin the data again behind its end: a run takes as many batches as it has steps")
	}
	return e.Wrap(err)
}

// stopped returns an error if ctx has ended.
func stopped(ctx context.Context, format string, args ...any) error {
	if ctx.Err() == nil {
		return nil
	}
	return diag.New(diag.Canceled, "stopped "+format, args...).Wrap(context.Cause(ctx))
}

// awaitPrefetched waits until the Dataset is not being read. The batch stays for the next step.
func (t *Trainer) awaitPrefetched() {
	if t.next != nil {
		<-t.next.done
	}
}

// dropPrefetched forgets the batch that was read ahead, since the run goes on elsewhere or ends. It
// cancels the read and waits for its end: the caller may close the Dataset next.
func (t *Trainer) dropPrefetched() {
	if t.next != nil {
		t.next.cancel()
	}
	t.awaitPrefetched()
	if t.next != nil {
		t.next.staged.free()
	}
	t.next = nil
}

// reject records a step whose update was refused, and ends a run that has diverged.
func (t *Trainer) reject(ctx context.Context, b *prefetched, r StepResult) error {
	t.guard.Rejected++
	t.last.Rejected++
	replay := ""
	// The first of several in a row is the one to look at, and a state is large.
	if t.guard.Rejected == 1 {
		var err error
		if replay, err = t.keepRejected(ctx, b.batch); err != nil {
			return err
		}
	}
	t.opts.Events.Emit(event.Rejected{Step: r.Step, Loss: event.Figure(r.Loss),
		GradNorm: event.Figure(r.GradNorm), Why: r.Rejected, Replay: replay})
	t.advance(b)
	if t.guard.Rejected < maxRejected {
		return nil
	}
	return diag.New(diag.TrainingLost, "%d steps in a row were rejected; the last because %s",
		t.guard.Rejected, r.Rejected).At("step %d", t.step).
		Try("look at the first of them with --rerun, lower optimizer.lr, or look at the data")
}

// Eval returns the mean loss over the labels of the validation sequences, the first
// [MaxEvalSequences] of them, and emits it as an event. With an error the loss is 0. Eval changes
// neither the state nor the position in the data.
func (t *Trainer) Eval(ctx context.Context) (float64, error) {
	if err := t.usable(); err != nil {
		return 0, err
	}
	if t.opts.Eval == nil {
		return 0, diag.New(diag.BadInput, "the run has no validation data").
			Try("set train.Options.Eval")
	}
	stopped, err := t.validate(ctx, ctx)
	if err == nil && stopped {
		err = diag.New(diag.Canceled, "the validation of step %d was stopped", t.step).
			Wrap(context.Cause(ctx))
	}
	if err == nil && t.evalLabels == 0 {
		err = diag.New(diag.DataEmpty, "the validation data has no label")
	}
	if err != nil {
		return 0, err
	}
	return t.last.Eval, nil
}

// validate computes the validation loss. Before each batch it votes on whether the run is to stop,
// and then gives up: all processes do so at the same batch.
func (t *Trainer) validate(ctx, stop context.Context) (stopped bool, err error) {
	if t.opts.Eval == nil {
		return false, nil
	}
	defer t.span("validate")()
	t.opts.Events.Emit(event.Busy{Task: fmt.Sprintf("evaluating step %d", t.step)})
	t.owes = true
	// The mean over labels, not over batches: the last batch may have fewer.
	sum, labels := 0.0, int64(0)
	size := int64(t.opts.Recipe.Microbatch)
	for first := int64(0); first < min(t.opts.Eval.EvalSequences(), MaxEvalSequences); first += size {
		if stopped, err := t.vote(ctx, stop); err != nil || stopped {
			return stopped, err
		}
		b, err := t.opts.Eval.Eval(ctx, first, int(size), 0, 1)
		if err != nil {
			return false, readError(err, "validation sequence %d", first)
		}
		if b, err = t.checkBatch(b, int(size)); err != nil {
			return false, err
		}
		loss, err := t.evaluate(ctx, b)
		if err != nil {
			return false, err
		}
		sum, labels = sum+loss, labels+b.Count
	}
	t.owes, t.evalLabels = false, labels
	if labels == 0 { // a loss of 0 would be the best of all
		t.opts.Events.Emit(event.Warning{Code: string(diag.DataEmpty),
			Text: fmt.Sprintf("the validation after step %d has no label", t.step)})
		return false, nil
	}
	t.last.Eval = sum / float64(labels)
	t.opts.Events.Emit(event.Eval{Step: t.step, Loss: event.Figure(t.last.Eval), Tokens: labels})
	return false, nil
}

// evaluate returns the sum of the losses of a microbatch. The watchdog times each by itself.
func (t *Trainer) evaluate(ctx context.Context, b *data.Batch) (float64, error) {
	defer t.phase(phaseEvaluate)()
	return t.exec.evaluate(ctx, b)
}

// report emits the event of a step.
func (t *Trainer) report(r StepResult) {
	steps := t.opts.Recipe.Steps
	e := event.Step{Step: t.step, Steps: steps, Loss: event.Figure(r.Loss),
		GradNorm: event.Figure(r.GradNorm), Rate: r.LR, Tokens: int64(t.step) * r.Tokens,
		Seconds: r.Seconds, MemoryBytes: t.memory()}
	if r.Seconds > 0 {
		e.TokensPerSecond = float64(r.Tokens) / r.Seconds
		if t.opts.Peak > 0 {
			e.MFU = e.TokensPerSecond * t.flops / t.opts.Peak
		}
	}
	if t.pace == 0 {
		t.pace = r.Seconds
	}
	// A moving average over about 16 steps: one slow step says little about those to come.
	t.pace += (r.Seconds - t.pace) / 16
	e.ETASeconds = float64(steps-t.step) * t.pace
	t.opts.Events.Emit(e)
}

// trainingFLOPs returns the arithmetic of one token, forward and backward, which costs twice the
// forward pass, as plans count it: attention has the keys that the mask lets through. Where a model
// does not count its own, it is two operations for each parameter.
func trainingFLOPs(m model.Model, seq int) float64 {
	if c, ok := m.(interface{ Forward(seq int64) model.Flops }); ok {
		return c.Forward(int64(seq)).Training().Sum()
	}
	flops := 0.0
	for _, p := range m.Params() {
		flops += 3 * 2 * float64(p.Size())
	}
	return flops
}

// memory is the high-water mark of the fullest device, in bytes.
func (t *Trainer) memory() int64 { return slices.Max(append(t.opts.Engine.HighWater(), 0)) }

// span marks a part of a step for the watchdog and for the trace; the returned function ends it.
func (t *Trainer) span(name string) func() {
	done, end := t.watchdog.runs(name), t.mark(name)
	return func() {
		end()
		done()
	}
}

// mark marks a part of a step for the trace alone.
func (t *Trainer) mark(name string) func() {
	if t.opts.Spans == nil {
		return func() {}
	}
	return t.opts.Spans.Begin(t.step+1, name)
}

// joinsSpansAfter is the step after which the processes join their spans; 0 is never.
func (t *Trainer) joinsSpansAfter() int {
	if j, ok := t.opts.Spans.(spanJoiner); ok && t.others != nil {
		return j.Last()
	}
	return 0
}

// joinSpans gives the spans of all processes to process 0, if the step is the last of a profile.
func (t *Trainer) joinSpans(ctx context.Context, step int) error {
	if t.joinsSpansAfter() != step {
		return nil
	}
	defer t.phase(phaseVote)()
	j := t.opts.Spans.(spanJoiner)
	mine, err := j.Mine()
	if err != nil {
		return err
	}
	all, err := t.others.blobs(ctx, "spans", mine)
	for n, spans := range all {
		if err == nil && n != 0 && t.others.Self == 0 {
			err = j.Join(n, spans)
		}
	}
	return err
}
