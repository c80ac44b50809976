// Package quantize turns a checkpoint into one whose weights are quantized.
//
// [Quantize] reads a folder that transformers loads and writes another one, in MXFP8 or NVFP4, by
// the names and the signs of one of two families of loaders:
//
//	compressed-tensors  NVFP4  m.weight_packed U8, m.weight_scale F8_E4M3,
//	                           m.weight_global_scale F32 [1] = 2688/amax, which divides
//	                    MXFP8  m.weight F8_E4M3, m.weight_scale U8
//	modelopt            NVFP4  m.weight U8, m.weight_scale F8_E4M3,
//	                           m.weight_scale_2 F32 = amax/2688, which multiplies
//	                    MXFP8  m.weight F8_E4M3, m.weight_scale U8
//
// Blocks run along the last dimension, which a linear layer sums over: 32 elements, or 16. Element
// 2k of NVFP4 is the low half of its byte. Scales are stored row by row, not in the order that
// tensor cores read; loaders bring them into that.
//
// # What is quantized
//
// The weights of linear layers: matrices called *.weight. Embeddings, the head, norms and routers
// stay as they are, and so do
// matrices that do not divide into blocks; the report gives the reason for each tensor.
// Loaders fuse q, k and v, and gate and up, into one matrix with one global scale, so these share
// theirs, in both families, and are quantized or kept together.
//
// # Activations
//
// No data passes through the model here, so nothing is known of its activations. MXFP8 needs
// nothing: its scales are found at run time. NVFP4 has a global scale for activations that cannot
// be found so; it is not made up. Without one the checkpoint says that weights alone are quantized
// (NVFP4A16, W4A16_NVFP4). [Options.InputAmax] gives the largest activation that is to be expected,
// and then every layer has the scale of it.
//
// # Blocks of little or nothing
//
// A block of zeros has scale 1 in modelopt's layout and 0.125 in the other, as the families write
// it. A block so small beside the tensor's largest element that its scale rounds to zero has the
// smallest scale instead, 2⁻⁹: training flushes it (package block), a checkpoint need not.
//
// # Work that stops and goes on
//
// Tensors pass through in bands of some megabytes, so the memory does not depend on the model.
// Files are put in place when they are whole; beside them the folder .quantize says what is done.
// The same call goes on where it stopped and ends with the same bytes. A folder with anything else
// in it is refused. config.json comes last.
package quantize
