// A sum that runs only if a flag is set, inside a loop that ends when the data says so.
module @branch attributes {mhlo.num_replicas = $N : i32} {
  func.func @main(%x: tensor<1024xf32> {tf.aliasing_output = 0 : i32}, %flag: tensor<i1>, %limit: tensor<f32>) -> (tensor<1024xf32>, tensor<1024xf32>) {
    %r:3 = stablehlo.while(%y = %x, %f = %flag, %l = %limit) : tensor<1024xf32>, tensor<i1>, tensor<f32>
    cond {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %s = stablehlo.reduce(%y init: %zero) applies stablehlo.maximum across dimensions = [0] : (tensor<1024xf32>, tensor<f32>) -> tensor<f32>
      %lt = stablehlo.compare LT, %s, %l : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %lt : tensor<i1>
    } do {
      %n = "stablehlo.all_reduce"(%y) ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %c = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %c : tensor<f32>
      }) {replica_groups = dense<$GROUP> : tensor<1x$Nxi64>} : (tensor<1024xf32>) -> tensor<1024xf32>
      stablehlo.return %n, %f, %l : tensor<1024xf32>, tensor<i1>, tensor<f32>
    }
    %c = "stablehlo.if"(%flag) ({
      %g = "stablehlo.all_gather"(%r#0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0,1],[2,3],[4,5],[6,7]]> : tensor<4x2xi64>} : (tensor<1024xf32>) -> tensor<2048xf32>
      %h = stablehlo.slice %g [512:1536] : (tensor<2048xf32>) -> tensor<1024xf32>
      stablehlo.return %h : tensor<1024xf32>
    }, {
      stablehlo.return %x : tensor<1024xf32>
    }) : (tensor<i1>) -> tensor<1024xf32>
    return %r#0, %c : tensor<1024xf32>, tensor<1024xf32>
  }
}
