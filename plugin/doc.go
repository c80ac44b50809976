// Package plugin turns the name of an engine into verified files on disk.
//
// An engine is a PJRT plugin and the libraries that it loads. None is part of Deepwell: an
// [Installer] asks the user's own pip for pinned wheels by package name (pip's settings say from
// where) or takes them from files, checks each wheel against the SHA-256 in this binary, and
// unpacks the few files that are needed. [Open] verifies every byte again before anything is
// loaded. Nothing here loads a library; package engine does.
//
// # Engines
//
//	cpu         XLA for the CPU.
//	cuda13      XLA for NVIDIA GPUs, as far as a compile needs it: the plugin, ptxas, libdevice,
//	            cuDNN's planner and what it asks for. No GPU and no driver are needed.
//	cuda13-run  The same and what a GPU host needs to run: NCCL, cuBLAS, the CUDA runtime and the
//	            rest of cuDNN. Its libraries load and it compiles programs. Its plugin, which is
//	            cuda13's, runs on the software GPU of the tests; the rest has run nowhere.
//
// # What is trusted
//
// The digest of every wheel, and of the tree of files that comes out of the wheels, is a constant
// of this binary (table.go). The manifest beside the files only tells which file differs. A tree
// with a changed, missing, extra or irregular file is refused (DW2012): an extra file matters
// because the plugin looks libraries up by name in its own tree. A wheel is read as if its author
// were an enemy (wheel.go).
//
// Folders that others can write to, or that belong to someone else than the user or root, are
// refused (DW2013), as sshd refuses its keys. Files are hashed through an open descriptor, and what
// the kernel tells of them (device, inode, size, mtime, ctime) is compared after hashing and, by
// [Bundle.Loaded], after the load, together with what the process has mapped as code. Loading from
// a copy in memory instead would take the plugin's RPATH from it. Not defended against: root, and
// the user's own other programs.
//
// # What is on disk
//
//	DIR/cuda13/             an installed engine; it appears by one rename
//	DIR/cuda13/manifest.json
//	DIR/.cuda13.lock        held while an installation runs; holds the process id
//	DIR/.cuda13.tmp-*       an installation that runs, or was killed; the next one removes it
//
// # What a compile without a GPU loads
//
// Observed with strace over 13 programs, each for b200 and rtx6000pro (block-scaled products,
// attention, fusions, a convolution, an FFT), with jax-cuda13-pjrt 0.12.0.1 and cuDNN 9.24.1; 16 of
// the 26 compiles asked cuDNN for plans, the convolution did not:
//
//   - The plugin finds every library in the tree by its own RPATH; only the stand-in for libcuda
//     has to be loaded before it.
//   - cuDNN opens libcudnn, _graph, _heuristic and the three _engines libraries, and libcublasLt,
//     without which it ends the process (SIGABRT). It opened neither libcublas nor libcudnn_ops,
//     _cnn, _adv and _ext.
//   - NVRTC was not opened either. It is kept because three of those libraries name it, and a
//     program that was not tried might need it.
//   - ptxas is the only CUDA tool that is needed; nvlink, if there, is asked for its version.
//   - ptxas and libdevice are found beside the plugin even without Bundle.DataDir, but then a
//     ptxas on PATH goes first. With it, the folder's path is text in the optimized program.
//   - The target's dnn_version made no difference that was seen: five values from 9.10.0 to 9.25.0
//     gave equal memory sizes for two programs. Bundle.CuDNN is the true one.
package plugin
