// Package capture turns the name of a model into its configuration and, where there are any, its
// weights; and parameters back into a folder that Hugging Face's libraries load.
//
// A source is one of
//
//	llama3.1-8b            a preset, by name or alias; preset:NAME where a folder has the same name
//	./Llama-3.1-8B         a folder with config.json and *.safetensors
//	./my/config.json       a configuration alone, for a model that begins from random weights
//	./model.pt2            what torch.export.save wrote, with its weights
//	hf:Qwen/Qwen3-8B       a repository in the Hugging Face cache; hf:ORG/NAME@REVISION
//
// Nothing is downloaded: where a repository is not in the cache, the error gives the command that
// brings it there.
//
//	m, err := capture.Open("hf:Qwen/Qwen3-0.6B", capture.Options{})
//	if err != nil {
//		return err
//	}
//	defer m.Close()
//	for _, p := range m.Config.Params() {
//		buf := make([]float32, p.Size())
//		err := m.Read(&p, buf)
//		...
//	}
//
// # Weights
//
// Opening reads headers only. [Model.Check] compares every tensor that a parameter is made of with
// what the files hold, so that a model is refused before the first gigabyte is read. An index
// without its files is a model too: it can be counted and its names compared, and reading from it
// says which files are missing.
//
// [Model.Read] brings F32, F64, BF16 and F16 to float32, block by block, through the file and not
// through mapped memory: a file that another program truncates is an error, not a signal.
//
// # Export
//
// [Export] writes config.json, weights and tokenizer. Where elements stand in tensors is known to
// package model alone ([model.Take], [model.Put]), so what is written is what would be read.
package capture
