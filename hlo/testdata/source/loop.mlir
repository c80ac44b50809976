// Six layers in a while loop: gather the layer's shard, multiply, scatter a gradient. Every replica of 8.
module @loop attributes {mhlo.num_replicas = $N : i32} {
  func.func @main(%w: tensor<6x128x1024xbf16>, %x: tensor<512x1024xbf16>, %g: tensor<6x128x1024xbf16> {tf.aliasing_output = 1 : i32}) -> (tensor<512x1024xbf16>, tensor<6x128x1024xbf16>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %r:4 = stablehlo.while(%i = %zero, %y = %x, %acc = %g, %ws = %w) : tensor<i32>, tensor<512x1024xbf16>, tensor<6x128x1024xbf16>, tensor<6x128x1024xbf16>
    cond {
      %n = stablehlo.constant dense<6> : tensor<i32>
      %lt = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %lt : tensor<i1>
    } do {
      %z = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %s3 = stablehlo.dynamic_slice %ws, %i, %z, %z, sizes = [1, 128, 1024] : (tensor<6x128x1024xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x128x1024xbf16>
      %s = stablehlo.reshape %s3 : (tensor<1x128x1024xbf16>) -> tensor<128x1024xbf16>
      %full = "stablehlo.all_gather"(%s) {all_gather_dim = 0 : i64, replica_groups = dense<$GROUP> : tensor<1x$Nxi64>, mhlo.frontend_attributes = {is_pipelineable = "true"}} : (tensor<128x1024xbf16>) -> tensor<1024x1024xbf16> loc("layer/gather")
      %h = stablehlo.dot_general %y, %full, contracting_dims = [1] x [0] : (tensor<512x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<512x1024xbf16>
      %t = stablehlo.tanh %h : tensor<512x1024xbf16>
      %dw = stablehlo.dot_general %y, %t, contracting_dims = [0] x [0] : (tensor<512x1024xbf16>, tensor<512x1024xbf16>) -> tensor<1024x1024xbf16>
      %rs = "stablehlo.reduce_scatter"(%dw) ({
        ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
          %c = stablehlo.add %a, %b : tensor<bf16>
          stablehlo.return %c : tensor<bf16>
      }) {scatter_dimension = 0 : i64, replica_groups = dense<$GROUP> : tensor<1x$Nxi64>} : (tensor<1024x1024xbf16>) -> tensor<128x1024xbf16> loc("layer/scatter")
      %rs3 = stablehlo.reshape %rs : (tensor<128x1024xbf16>) -> tensor<1x128x1024xbf16>
      %acc2 = stablehlo.dynamic_update_slice %acc, %rs3, %i, %z, %z : (tensor<6x128x1024xbf16>, tensor<1x128x1024xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<6x128x1024xbf16>
      %i2 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %i2, %t, %acc2, %ws : tensor<i32>, tensor<512x1024xbf16>, tensor<6x128x1024xbf16>, tensor<6x128x1024xbf16>
    }
    return %r#1, %r#2 : tensor<512x1024xbf16>, tensor<6x128x1024xbf16>
  }
}
