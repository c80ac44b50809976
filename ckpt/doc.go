// Package ckpt turns slices of a running state into a folder that can be resumed from, and back.
//
// A state is a list of named tensors behind a small interface: a [Source] gives any box of any
// tensor. [Save] writes a source; [Open] and [Latest] give a [Checkpoint], which is itself one:
//
//	err := ckpt.Save(ctx, "run", step, meta, state, ckpt.Options{Keep: 3})
//	...
//	c, err := ckpt.Latest(ctx, "run", events)
//	if err != nil {
//		return err
//	}
//	defer c.Close()
//	err = c.ReadSlice("embed", box, dst)
//
// # On disk
//
//	run/.lock                             held by the process that writes
//	run/step-00000120/manifest.json       what is where, with a SHA-256 of every part
//	run/step-00000120/part-00000.safetensors
//	run/.tmp-step-00000130/               a save under way, or one that was killed; of several
//	                                      processes with a mark behind its name
//
// Each writer of a [Draft] has a part file of its own, writers in other processes included
// ([Join]), and the manifest says which box of which tensor is stored where. The boxes of a tensor
// cover it exactly once; how it was sharded says nothing about how they can be read, so a state
// written by 8 ranks is read by 3. Part files are safetensors, so any tool can look into one.
//
// A step is committed by one rename: parts, manifest and folder are synced before it, the parent
// after it. A writer that dies leaves only the temporary folder, which readers do not see and the
// next writer removes. No step is ever changed in place. The newest is found by looking and
// hashing, not by a file that says so, and [Latest] steps back, with a warning, over one that is
// damaged. A checkpoint is pruned only after a newer one has been read back and found whole.
//
// # Versions
//
// The manifest's first member is its version and its last is the SHA-256 of all bytes before it;
// both hold for every version to come. Within a version the text has one form only: whatever does
// not print as it was read is refused, and with it unknown, doubled and misspelled members. What
// older readers may ignore goes into [Meta].Extra, which they keep; what they must not ignore
// takes a new version, which they refuse by name. testdata/v1 is a checkpoint of version 1 that
// must open for ever.
//
// # Memory, and saving behind the step
//
// A save reads the state chunk by chunk into one buffer for each worker and never holds a second
// copy. It needs the state to stand still meanwhile. A save beside the running step needs no other
// interface: copy the device's state into a [Memory], which is the only wait, and hand that Memory
// to Save in a goroutine; the bytes belong to the writer then, and training cannot change them.
package ckpt
