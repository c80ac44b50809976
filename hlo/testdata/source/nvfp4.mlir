// One NVFP4 linear: FP4 elements share bytes, scales are E4M3.
module @nvfp4 attributes {mhlo.num_replicas = $N : i32} {
  func.func @main(%x: tensor<512x1024xf4E2M1FN>, %xs: tensor<512x64xf8E4M3FN>, %w: tensor<2048x1024xf4E2M1FN>, %ws: tensor<2048x64xf8E4M3FN>) -> tensor<512x2048xbf16> {
    %y = stablehlo.custom_call @__op$block_scaled_dot(%x, %w, %xs, %ws) {api_version = 2 : i32} : (tensor<512x1024xf4E2M1FN>, tensor<2048x1024xf4E2M1FN>, tensor<512x64xf8E4M3FN>, tensor<2048x64xf8E4M3FN>) -> tensor<512x2048xbf16>
    return %y : tensor<512x2048xbf16>
  }
}
